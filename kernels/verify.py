"""Acceptance rules that go from the root down: try the children of the accepted node in order, one after the other.

Legend: B batch, N nodes, V vocabulary, S levels. The torch reference draws through an `Rng` and asks for one row of p at
a time; Triton takes all uniforms and the dense p, and walks a row's whole tree in one program. It reads single numbers of
p along the way, and whole rows of V only where a rule needs a sum over the vocabulary and for the last draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from specresearch.kernels.backend import jit, on_triton, power_of_2, tl
from specresearch.kernels.graph import may_ask
from specresearch.kernels.sampling import pick, pick_row, sum_row
from specresearch.kernels.tree import links
from specresearch.types import Probs, Rng, Tree, Verdict

Links = tuple[Tensor, Tensor]  # first child, next sibling of every node, [B, N] each


class Uniforms:
    """An `Rng` of uniforms that were drawn before: `coins` [B, N] by coin number, `final` [B] for the last draw."""

    def __init__(self, coins: Tensor, final: Tensor):
        self.coins, self.final = coins, final

    def accept(self, coin_id: Tensor | int, threshold: Tensor) -> Tensor:
        index = torch.as_tensor(coin_id, device=self.coins.device).expand(threshold.shape[0])
        return self.coins.gather(1, index[:, None])[:, 0] < threshold

    def pick(self, weights: Tensor) -> Tensor:
        return pick(weights, self.final)

    def draw(self, weights: Tensor, slot: int) -> Tensor:
        raise NotImplementedError("these uniforms are for verification alone")

    def uniforms(self, nodes: int) -> tuple[Tensor, Tensor]:
        return self.coins, self.final


class OneHot(Probs, Protocol):
    """A p that can name the one token that has all mass, where one has, without laying out rows of the vocabulary."""

    one_hot: bool

    def choices(self) -> Tensor:
        """-> tokens [B, N]; -1 where p is no law"""
        ...


def is_one_hot(p: object) -> TypeGuard[OneHot]:
    return getattr(p, "one_hot", False)  # to ask whether it is a protocol's takes 0.1 ms


class Rule(Protocol):
    """What a rule decides at one node, for all rows at once. It keeps, per row, what the last token will be drawn from."""

    def enter(self, node: Tensor, moving: Tensor) -> None:
        """Rows that are `moving` [B] now stand at `node` [B]; the others must not change."""
        ...

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        """Judge one child [B] per row; rows where `trying` is False must not change -> bool [B]."""
        ...

    def finish(self, rng: Rng) -> Tensor:
        """Draw the token after the accepted path -> [B]"""
        ...


def walk(tree: Tree, rule: Rule, rng: Rng) -> Verdict:
    return walk_links(tree.tokens, links(tree.parent, tree.valid), tree.levels, rule, rng)


def walk_links(tokens: Tensor, tree_links: Links, levels: int, rule: Rule, rng: Rng) -> Verdict:
    """Links are followed as they are given, `levels` down and N children a node at most; one outside [0, N) ends its list.

    Fixed shapes throughout; on the CPU, where asking is free, loops end as soon as nothing is left to do.
    """
    batch, nodes = tokens.shape
    first_child, next_sibling = tree_links
    may_stop = may_ask(tokens.device)
    node = torch.zeros(batch, dtype=torch.long, device=tokens.device)
    path = torch.full((batch, levels + 1), -1, dtype=torch.long, device=tokens.device)
    path[:, 0] = 0
    moving = torch.ones(batch, dtype=torch.bool, device=tokens.device)
    for level in range(levels + 1):
        if level and may_stop and not moving.any():
            break
        rule.enter(node, moving)
        child = torch.where(moving, first_child.gather(1, node[:, None])[:, 0], -1)
        chosen = torch.full_like(node, -1)
        for _ in range(nodes if level < levels else 0):
            trying = (child >= 0) & (child < nodes)
            if may_stop and not trying.any():
                break
            at = torch.where(trying, child, 0)[:, None]
            ok = rule.accept(at[:, 0], tokens.gather(1, at)[:, 0], trying, rng) & trying
            chosen = torch.where(ok, child, chosen)
            child = torch.where(trying & ~ok, next_sibling.gather(1, at)[:, 0], -1)
        moving = moving & (chosen >= 0)
        node = torch.where(moving, chosen, node)
        if level < levels:
            path[:, level + 1] = torch.where(moving, chosen, -1)
    return Verdict(path, (path >= 0).sum(1), rule.finish(rng))


def plain(tree: Tree, p: Probs, rng: Rng) -> Verdict:
    """A step without drafts, for rules that compare p with q: drafts without a q are an error, which is no case for them."""
    if tree.tokens.shape[1] > 1:
        raise ValueError(f"drafts of the law {tree.law} came without the q that they were drawn from")
    root = torch.zeros_like(tree.tokens[:, 0])
    path = torch.nn.functional.pad(root[:, None], (0, tree.levels), value=-1)
    return Verdict(path, root + 1, rng.pick(p(root)))


# -- the rules ---------------------------------------------------------------------------------------------------------


def greedy(tree: Tree, p: Probs, rng: Rng) -> Verdict:
    """Accept the child that is p's argmax. p is one-hot; a row that is no law (NaN) accepts nothing and gives -1."""
    choice = p.choices() if is_one_hot(p) else _choices(p.all())
    if tree.levels == 0:  # nothing was drafted
        nothing = torch.zeros_like(choice[:, :1])
        return Verdict(nothing, nothing[:, 0] + 1, choice[:, 0])
    if on_triton(tree.tokens):
        return greedy_links(tree.tokens, links(tree.parent, tree.valid), tree.levels, choice)
    return _follow(tree, choice)


def _choices(p: Tensor) -> Tensor:
    top, token = p.max(-1)
    return torch.where(top > 0, token, -1)


def _follow(tree: Tree, choice: Tensor) -> Verdict:
    """The path of the choices [B, N], in a handful of operators: a node is on it if it is what was chosen after its parent,
    and its parent is on it. Of equal siblings the first counts."""
    tokens, parent, nodes = tree.tokens, tree.parent.clamp(min=0), tree.tokens.shape[1]
    right = tree.valid & (tokens == choice.gather(1, parent)) & (tokens >= 0) & (tree.depth <= tree.levels)
    right[:, 0] = False
    index = torch.arange(nodes, device=tokens.device)
    twins = (parent[:, :, None] == parent[:, None]) & right[:, None] & (index < index[:, None])
    right = right & ~twins.any(-1)  # right twins have the same token
    right[:, 0] = True
    on = right
    for _ in range(tree.levels - 1):
        on = right & on.gather(1, parent)
    path = torch.full((tokens.shape[0], tree.levels + 2), -1, dtype=torch.long, device=tokens.device)
    place = torch.where(on, tree.depth, tree.levels + 1)  # the others land in the spare last column
    path = path.scatter(1, place, index.expand_as(place))[:, :-1]
    length = (path >= 0).sum(1)
    return Verdict(path, length, choice.gather(1, path.gather(1, length[:, None] - 1))[:, 0])


def greedy_links(tokens: Tensor, tree_links: Links, levels: int, choice: Tensor) -> Verdict:
    """The same, where the target's choice after every node [B, N] is known."""
    zero = choice[:, 0].double() * 0
    if on_triton(tokens):
        return _walk_triton(_GREEDY, tokens, tree_links, levels, choice, (zero[:, None], zero))
    rule = GreedyRule(lambda node: choice.gather(1, node[:, None])[:, 0])
    return walk_links(tokens, tree_links, levels, rule, Uniforms(zero[:, None], zero))


class GreedyRule:
    choice: Tensor

    def __init__(self, choose: Callable[[Tensor], Tensor]):
        self.choose = choose

    def enter(self, node: Tensor, moving: Tensor) -> None:
        self.choice = rows_that_move(self, "choice", moving, self.choose(node))

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        return trying & (token == self.choice) & (token >= 0)  # -1 is no token

    def finish(self, rng: Rng) -> Tensor:
        return self.choice


def sample_and_match(tree: Tree, p: Probs, rng: Rng) -> Verdict:
    """Draw from p at every node that is reached, and walk on to the child that equals the draw."""
    return walk(tree, MatchRule(p, rng), rng)


class MatchRule(GreedyRule):
    """The draw is the token that is emitted, whether or not a child equals it."""

    def __init__(self, rows: Callable[[Tensor], Tensor], rng: Rng):
        self.rows, self.rng = rows, rng

    def enter(self, node: Tensor, moving: Tensor) -> None:
        law = torch.where(moving[:, None], self.rows(node), 0.0)  # rows that stand still draw nothing
        self.choice = rows_that_move(self, "choice", moving, self.rng.pick(law))


def target_only(tree: Tree, p: Probs, rng: Rng, single: float = 1.0, acc: float = 1.0) -> Verdict:
    """SGLang's rule: one coin per parent, laid against the running sum of p over its children. A tried token has no mass
    left, so a repeated sibling is dead. Lossless at thresholds of 1."""
    if on_triton(tree.tokens) and (given := rng.uniforms(tree.tokens.shape[1])):
        tree_links = links(tree.parent, tree.valid)
        return _walk_triton(
            _TARGET_ONLY, tree.tokens, tree_links, tree.levels, p.all(), given, single, acc, _linked(tree)
        )
    return walk(tree, TargetOnlyRule(p, single, acc), rng)


def target_only_links(
    tokens: Tensor, tree_links: Links, levels: int, p: Tensor, coins: Tensor, final: Tensor, single: float, acc: float
) -> Verdict:
    """The same for dense p [B, N, V], and as SGLang counts: the mass of a repeated sibling counts again."""
    if on_triton(tokens):
        return _walk_triton(_TARGET_ONLY, tokens, tree_links, levels, p, (coins, final), single, acc)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    rule = TargetOnlyRule(lambda node: p[rows, node], single, acc, repeats=True)
    return walk_links(tokens, tree_links, levels, rule, Uniforms(coins, final))


class TargetOnlyRule:
    p: Tensor
    residual: Tensor
    sum: Tensor
    coin: Tensor
    last: Tensor

    def __init__(self, rows: Callable[[Tensor], Tensor], single: float, acc: float, repeats: bool = False):
        self.rows, self.single, self.acc, self.repeats = rows, single, acc, repeats

    def enter(self, node: Tensor, moving: Tensor) -> None:
        p = self.rows(node)
        self.p = self.residual = rows_that_move(self, "residual", moving, p)
        self.sum = rows_that_move(self, "sum", moving, torch.zeros_like(p[:, 0]))
        self.coin = rows_that_move(self, "coin", moving, node)
        self.last = rows_that_move(self, "last", moving, torch.full_like(node, -1))

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        token, real = _in_range(token, self.p.shape[1])
        mass = torch.where(real, (self.p if self.repeats else self.residual).gather(1, token[:, None])[:, 0], 0.0)
        self.sum = torch.where(trying, self.sum + mass, self.sum)
        below = rng.accept(self.coin, torch.where(trying, self.sum / self.acc, 0.0))
        ok = (below | (mass >= self.single)) & (mass > 0)
        out = trying & ~ok
        self.residual = _without(self.residual, token, out & real)
        self.last = torch.where(out & (mass > 0), token, self.last)
        return ok

    def finish(self, rng: Rng) -> Tensor:
        return _pick_left(self.residual, self.last, rng)


def rejection(tree: Tree, p: Probs, rng: Rng) -> Verdict:
    """Lossless rejection sampling; how the children were chosen (`tree.law`) decides which rule applies. Where p is one-hot
    every one of them accepts the child that p chooses, and no other."""
    if is_one_hot(p):
        return greedy(tree, p, rng)
    point = tree.law == "point" or tree.q is None
    if on_triton(tree.tokens) and (given := rng.uniforms(tree.tokens.shape[1])):
        kind = _POINT if point else _WITHOUT_REPLACEMENT if tree.law == "without_replacement" else _IID
        q, tree_links = None if point else tree.q, links(tree.parent, tree.valid)
        return _walk_triton(kind, tree.tokens, tree_links, tree.levels, p.all(), given, 1.0, 1.0, _linked(tree), q)
    rule: Rule = PointRule(p) if point else DrawnRule(p, tree)
    return walk(tree, rule, rng)


class PointRule:
    """Each child is a point mass: accept x if u < p(x) / what is left, else p <- p without x. Fresh coin per child. A tried
    token has no mass left, so a duplicate sibling can never be accepted."""

    residual: Tensor
    left: Tensor  # mass of the residual, in float64, so that little is lost in the subtractions
    last: Tensor

    def __init__(self, rows: Callable[[Tensor], Tensor]):
        self.rows = rows

    def enter(self, node: Tensor, moving: Tensor) -> None:
        p = self.rows(node)
        self.residual = rows_that_move(self, "residual", moving, p)
        self.left = rows_that_move(self, "left", moving, p.sum(1, dtype=torch.float64))
        self.last = rows_that_move(self, "last", moving, torch.full_like(node, -1))

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        mass = self.residual.gather(1, token[:, None])[:, 0].double()
        ok = rng.accept(child, torch.where(trying & (mass > 0), mass / self.left, 0.0))
        out = trying & ~ok
        self.last = torch.where(out & (mass > 0), token, self.last)
        self.left = torch.where(out, self.left - mass, self.left)
        self.residual = _without(self.residual, token, out)
        return ok

    def finish(self, rng: Rng) -> Tensor:
        return _pick_left(self.residual, self.last, rng)


class DrawnRule:
    """Children drawn from q: accept x if u < p(x) / q(x), else p <- norm (p - q)+, and without replacement q <- norm (q
    without x)."""

    residual: Tensor
    q: Tensor

    def __init__(self, rows: Callable[[Tensor], Tensor], tree: Tree):
        assert tree.q is not None
        self.rows, self.law_of_children = rows, tree.q
        self.without_replacement = tree.law == "without_replacement"

    def enter(self, node: Tensor, moving: Tensor) -> None:
        self.residual = rows_that_move(self, "residual", moving, self.rows(node))
        q = self.law_of_children[torch.arange(node.shape[0], device=node.device), node]
        self.q = rows_that_move(self, "q", moving, q)

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        token = token[:, None]
        q = self.q.gather(1, token)[:, 0]
        possible = trying & (q > 0)  # a child that q cannot draw is dead: p/0 must not accept it
        ok = rng.accept(child, torch.where(possible, self.residual.gather(1, token)[:, 0] / q, 0.0))
        out = (possible & ~ok)[:, None]
        rest = (self.residual - self.q).clamp(min=0)
        mass = rest.sum(1, keepdim=True)
        # p = q leaves no residual; rounding alone can reject there, and then p itself is right to within rounding.
        self.residual = torch.where(out & (mass > 0), rest / mass, self.residual)
        if self.without_replacement:
            left = self.q.scatter(1, token, 0.0)
            mass = left.sum(1, keepdim=True)
            self.q = torch.where(out, torch.where(mass > 0, left / mass, 0.0), self.q)
        return ok

    def finish(self, rng: Rng) -> Tensor:
        return rng.pick(self.residual)


def _in_range(token: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens that may index a row of p, and whether they are themselves: one outside the vocabulary has no mass."""
    real = (token >= 0) & (token < vocab)
    return torch.where(real, token, 0), real


def _without(weights: Tensor, token: Tensor, out: Tensor) -> Tensor:
    """Weights [B, V] less the token [B] of the rows that are `out`."""
    return torch.where(out[:, None], weights.scatter(1, token[:, None], 0.0), weights)


def _pick_left(residual: Tensor, last: Tensor, rng: Rng) -> Tensor:
    """Draw from the residual; where the children took all mass and rounding alone rejected the last of them, give that."""
    index = last.clamp(min=0)[:, None]
    stuck = (last >= 0) & (residual.sum(1) == 0)
    weight = torch.where(stuck[:, None], torch.ones_like(residual[:, :1]), residual.gather(1, index))
    return rng.pick(residual.scatter(1, index, weight))


def rows_that_move(rule: Rule, name: str, moving: Tensor, new: Tensor) -> Tensor:
    """`new` for the rows that move, what the rule had for the others."""
    old = getattr(rule, name, None)
    if old is None:
        return new
    return torch.where(moving.view(-1, *[1] * (new.dim() - 1)), new, old)


def chain(tokens: Tensor, q: Tensor, p: Tensor, coins: Tensor, final: Tensor) -> Verdict:
    """Leviathan et al. (arXiv:2211.17192, algorithm 1) on a chain: drafts `tokens` [B, S] without the root, q [B, S, V],
    p [B, S+1, V], uniforms `coins` [B, S] and `final` [B]. Accept x if u q(x) < p(x); the path counts drafts from 1.

    q(x) up to 5e-4 above 1 is rounding and counts as 1; any other q(x) outside (0, 1], NaN too, rejects. Elsewhere a NaN in
    q counts as 0. The rejected draft itself is never drawn again.
    """
    if on_triton(tokens):
        return _chain_triton(tokens, q, p, coins, final)
    steps = tokens.shape[1]
    tokens, real = _in_range(tokens, p.shape[2])
    px, qx = (x.gather(2, tokens[..., None])[..., 0] for x in (p[:, :steps], q))
    sound = real & (qx > 0) & (qx <= 1 + 5e-4)
    accepted = sound & (coins * qx.clamp(max=1) < px)
    kept = accepted.long().cumprod(1)
    stop = kept.sum(1)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    at = stop.clamp(max=max(steps - 1, 0))
    residual = p[rows, stop]
    if steps:
        less = (residual - q[rows, at].nan_to_num(0.0, posinf=torch.inf)).clamp(min=0)
        less = _without(less, tokens[rows, at], real[rows, at])
        residual = torch.where((stop < steps)[:, None], less, residual)
    place = torch.arange(steps + 1, device=tokens.device)
    return Verdict(torch.where(place <= stop[:, None], place, -1), stop + 1, pick(residual, final))


# -- Triton ------------------------------------------------------------------------------------------------------------

_GREEDY, _TARGET_ONLY, _POINT, _IID, _WITHOUT_REPLACEMENT = range(5)


def _linked(tree: Tree) -> Tensor:
    return torch.where(tree.valid, tree.parent, -1)


def _walk_triton(
    kind: int,
    tokens: Tensor,
    tree_links: Links,
    levels: int,
    p: Tensor,  # [B, N, V]; for the greedy rule the choices [B, N]
    uniforms: tuple[Tensor, Tensor],
    single: float = 1.0,
    acc: float = 1.0,
    parent: Tensor | None = None,  # [B, N] of the nodes that are linked; given: a repeated sibling is dead
    q: Tensor | None = None,
) -> Verdict:
    batch, nodes = tokens.shape
    vocab = 1 if kind == _GREEDY else p.shape[2]
    if kind != _GREEDY:  # the kernel computes in float32
        p, q = p.float(), None if q is None else q.float()
    path = torch.empty(batch, levels + 1, dtype=torch.long, device=tokens.device)
    length, following = (torch.empty(batch, dtype=torch.long, device=tokens.device) for _ in range(2))
    scratch = (
        p if kind == _GREEDY else torch.empty(2 if q is not None else 1, batch, vocab, dtype=p.dtype, device=p.device)
    )
    coins, final = (u.double().contiguous() for u in uniforms)
    tokens, first, sibling, p = tokens.contiguous(), *(x.contiguous() for x in tree_links), p.contiguous()
    _walk[(batch,)](
        *(
            tokens,
            first,
            sibling,
            tokens if parent is None else parent.contiguous(),
            p,
            p if q is None else q.contiguous(),
        ),
        *(
            coins,
            final,
            scratch,
            path,
            length,
            following,
            nodes,
            coins.shape[1],
            vocab,
            levels,
            float(single),
            float(acc),
        ),
        KIND=kind,
        DEAD=parent is not None,
        NODES=power_of_2(nodes),
        BLOCK=min(power_of_2(vocab), 1024),
        num_warps=1 if kind == _GREEDY else 8,
    )
    return Verdict(path, length, following)


@jit
def _walk(
    tokens, first, sibling, parent, p, q, coins, final, scratch, path, length, following,
    nodes, coin_count, vocab, levels, single, acc,
    KIND: tl.constexpr, DEAD: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's tree. KIND: 0 greedy (`p` holds the target's choices), 1 target-only, 2 point, 3 iid, 4 without replacement."""
    row = tl.program_id(0).to(tl.int64)
    tokens += row * nodes
    first += row * nodes
    sibling += row * nodes
    parent += row * nodes
    coins += row * coin_count
    path += row * (levels + 1)
    if KIND == 0:
        p += row * nodes
    else:
        p += row * nodes * vocab
        q += row * nodes * vocab
    residual = scratch + row * vocab  # written where a token was rejected
    rest = scratch + (tl.num_programs(0) + row) * vocab  # q of the untried children, without replacement
    index = tl.arange(0, NODES)

    node = tl.full([], 0, tl.int64)
    count = tl.full([], 0, tl.int32)
    moving = tl.full([], 1, tl.int32)
    rejected = tl.full([], 0, tl.int32)  # at this node
    last = tl.full([], -1, tl.int64)
    tl.store(path, 0)
    while (moving > 0) & (count < levels):
        child = tl.load(first + node)
        chosen = tl.full([], -1, tl.int64)
        hops = tl.full([], 0, tl.int32)
        rejected = tl.full([], 0, tl.int32)
        last = tl.full([], -1, tl.int64)
        running = tl.full([], 0.0, p.dtype.element_ty if KIND == 1 else tl.float64)
        mass_left = tl.full([], 0.0, tl.float64)
        if KIND == 2:
            if (child >= 0) & (child < nodes):
                mass_left = sum_row(p + node * vocab, vocab, BLOCK)
        while (chosen < 0) & (child >= 0) & (child < nodes) & (hops < nodes):
            token = tl.load(tokens + child)
            ok = tl.full([], 0, tl.int32)
            if KIND == 0:
                ok = ((token == tl.load(p + node)) & (token >= 0)).to(tl.int32)
            else:
                if KIND >= 3:
                    mass = tl.load(tl.where(rejected > 0, residual, p + node * vocab) + token)
                    drawn = tl.load(tl.where((rejected > 0) & (KIND == 4), rest, q + node * vocab) + token)
                    hit = tl.load(coins + child) < tl.div_rn(mass, drawn).to(tl.float64)
                    ok = tl.where(drawn > 0, tl.where(hit, 1, 0), 2)  # 2: q cannot draw it, the child is dead
                else:
                    real = (token >= 0) & (token < vocab)  # a token outside the vocabulary has no mass
                    mass = tl.load(p + node * vocab + token, mask=real, other=0.0)
                if DEAD & (KIND <= 2):
                    inside = index < nodes
                    twin = (tl.load(parent + index, mask=inside, other=-2) == tl.load(parent + child)) & (index < child)
                    twin = twin & (index > 0) & (tl.load(tokens + index, mask=inside, other=-1) == token)
                    mass = tl.where(tl.max(twin.to(tl.int32)) > 0, 0.0, mass)
                if KIND == 1:
                    running += mass
                    below = tl.load(coins + node) < tl.div_rn(running, acc).to(tl.float64)
                    ok = ((below | (mass >= single)) & (mass > 0)).to(tl.int32)
                elif KIND == 2:
                    ok = ((mass > 0) & (tl.load(coins + child) < mass.to(tl.float64) / mass_left)).to(tl.int32)
                    mass_left = tl.where(ok > 0, mass_left, mass_left - mass.to(tl.float64))
                if KIND <= 2:
                    last = tl.where((ok == 0) & (mass > 0), token, last)
            if (ok == 0) & (KIND > 0):
                if rejected == 0:
                    _copy(p + node * vocab, residual, vocab, BLOCK)
                    if KIND == 4:
                        _copy(q + node * vocab, rest, vocab, BLOCK)
                tl.debug_barrier()
                if KIND == 3:
                    _subtract(residual, q + node * vocab, vocab, BLOCK)
                elif KIND == 4:
                    _subtract(residual, rest, vocab, BLOCK)
                    _drop(rest, token, vocab, BLOCK)
                else:
                    tl.store(residual + token, 0.0, mask=(token >= 0) & (token < vocab))
                tl.debug_barrier()
                rejected += 1
            chosen = tl.where(ok == 1, child, chosen)
            child = tl.load(sibling + child)
            hops += 1
        if chosen >= 0:
            node = chosen
            count += 1
            rejected = tl.full([], 0, tl.int32)
            last = tl.full([], -1, tl.int64)
            tl.store(path + count, node)
        else:
            moving = tl.full([], 0, tl.int32)
    for place in range(count + 1, levels + 1):
        tl.store(path + place, -1)
    tl.store(length + row, count.to(tl.int64) + 1)
    if KIND == 0:
        tl.store(following + row, tl.load(p + node))
    else:
        source = tl.where(rejected > 0, residual, p + node * vocab)
        token = pick_row(source, tl.load(final + row), vocab, BLOCK)
        if KIND <= 2:
            if (token < 0) & (last >= 0):
                token = tl.where(sum_row(source, vocab, BLOCK) == 0, last, token)
        tl.store(following + row, token)


@jit
def _copy(source, target, vocab, BLOCK: tl.constexpr):
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < vocab), mask=at < vocab)


@jit
def _subtract(residual, q, vocab, BLOCK: tl.constexpr):
    """residual <- norm (residual - q)+, in place; unchanged where nothing is left."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        less = tl.load(residual + at, mask=at < vocab, other=0.0) - tl.load(q + at, mask=at < vocab, other=0.0)
        total += tl.sum(tl.maximum(less, 0.0)).to(tl.float64)
    if total > 0:
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            less = tl.load(residual + at, mask=at < vocab, other=0.0) - tl.load(q + at, mask=at < vocab, other=0.0)
            tl.store(residual + at, tl.maximum(less, 0.0) / total.to(less.dtype), mask=at < vocab)


@jit
def _drop(q, token, vocab, BLOCK: tl.constexpr):
    """q <- norm (q without token), in place."""
    tl.debug_barrier()
    tl.store(q + token, 0.0)
    tl.debug_barrier()
    total = sum_row(q, vocab, BLOCK)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(q + at, mask=at < vocab, other=0.0)
        tl.store(q + at, tl.where(total > 0, value / total.to(value.dtype), 0.0), mask=at < vocab)


def _chain_triton(tokens: Tensor, q: Tensor, p: Tensor, coins: Tensor, final: Tensor) -> Verdict:
    batch, steps, vocab = p.shape[0], tokens.shape[1], p.shape[2]
    p, q, coins = p.float(), q.float(), coins.float()
    path = torch.empty(batch, steps + 1, dtype=torch.long, device=tokens.device)
    length, following = (torch.empty(batch, dtype=torch.long, device=tokens.device) for _ in range(2))
    _chain[(batch,)](
        *(tokens.contiguous(), q.contiguous(), p.contiguous(), coins.contiguous(), final.double().contiguous()),
        *(torch.empty_like(p[:, 0]), path, length, following, steps, vocab),
        BLOCK=min(power_of_2(vocab), 1024),
        num_warps=8,
    )
    return Verdict(path, length, following)


@jit
def _chain(tokens, q, p, coins, final, scratch, path, length, following, steps, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tokens += row * steps
    coins += row * steps
    path += row * (steps + 1)
    p += row * (steps + 1) * vocab
    q += row * steps * vocab
    scratch += row * vocab
    stop = tl.full([], 0, tl.int32)
    going = tl.full([], 1, tl.int32)
    tl.store(path, 0)
    while (going > 0) & (stop < steps):
        token = tl.load(tokens + stop)
        real = (token >= 0) & (token < vocab)
        px = tl.load(p + stop * vocab + token, mask=real, other=0.0)
        qx = tl.load(q + stop * vocab + token, mask=real, other=0.0)
        accepted = (qx > 0) & (qx <= 1 + 5e-4) & (tl.load(coins + stop) * tl.minimum(qx, 1.0) < px)
        going = accepted.to(tl.int32)
        stop += going
        if going > 0:
            tl.store(path + stop, stop.to(tl.int64))
    for place in range(stop + 1, steps + 1):
        tl.store(path + place, -1)
    tl.store(length + row, stop.to(tl.int64) + 1)
    if stop < steps:
        token = tl.load(tokens + stop)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            less = tl.load(p + stop * vocab + at, mask=at < vocab, other=0.0)
            draft = tl.load(q + stop * vocab + at, mask=at < vocab, other=0.0)
            less = tl.maximum(less - tl.where(draft != draft, 0.0, draft), 0.0)
            tl.store(scratch + at, tl.where(at == token, 0.0, less), mask=at < vocab)
        tl.debug_barrier()
    source = tl.where(stop < steps, scratch, p + stop * vocab)
    tl.store(following + row, pick_row(source, tl.load(final + row), vocab, BLOCK))
