"""Every random outcome of one step of the shipped code, on a small vocabulary, and the law that they add up to.

Legend: R rows (one outcome of one instance each), I instances (pairs of laws), V vocabulary, H horizon.

A step emits a block of random length, so its *completed* law is compared: blocks are continued with draws from p up to a fixed
horizon, and the law over all sequences of that length must be p's own. Equality for every step, with fresh randomness and
drafts that depend on the past alone, gives equality for whole answers by induction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specresearch.kernels.tree import node_paths
from specresearch.types import Frontier, Probs, Rng, Step, Tree, TreePolicy, Verdict, Verifier

BATCH = 1 << 14  # outcomes replayed at once


@dataclass(frozen=True)
class Scripts:
    """Choices to replay: `choices` [R, L], -1 padded, of the instances `instance` [R]."""

    choices: Tensor
    instance: Tensor

    @staticmethod
    def start(instances: int) -> Scripts:
        return Scripts(torch.full((instances, 0), -1), torch.arange(instances))

    @staticmethod
    def join(parts: list[Scripts]) -> Scripts:
        length = max(part.choices.shape[1] for part in parts)
        padded = [torch.nn.functional.pad(p.choices, (0, length - p.choices.shape[1]), value=-1) for p in parts]
        return Scripts(torch.cat(padded), torch.cat([part.instance for part in parts]))

    def split(self, count: int) -> tuple[Scripts, list[Scripts]]:
        first, rest = (Scripts(self.choices[part], self.instance[part]) for part in (slice(count), slice(count, None)))
        return first, [rest] if len(rest.instance) else []


class Enumerator:
    """An `Rng` whose every call branches. Each batch row replays one script of choices; where a script ends, the row takes
    the first possible outcome and the others are noted in `untried`.

    A coin is an interval of uniforms not yet excluded: asked again with another threshold, it splits what is left.
    """

    def __init__(self, scripts: Scripts):
        rows = len(scripts.instance)
        self.scripts, self.rows = scripts, torch.arange(rows)
        self.taken = torch.full((rows, 0), -1)
        self.count = torch.zeros(rows, dtype=torch.long)  # choices made so far
        self.weight = torch.ones(rows, dtype=torch.float64)
        self.low = torch.zeros(rows, 0, dtype=torch.float64)  # [R, coins]
        self.high = self.low.clone()
        self.columns: dict[int, int] = {}
        self.untried: list[Scripts] = []

    def accept(self, coin_id: Tensor | int, threshold: Tensor) -> Tensor:
        threshold = threshold.double()
        column = self._column(torch.as_tensor(coin_id).expand(len(self.rows)))
        low, high = self.low[self.rows, column], self.high[self.rows, column]
        open_ = (threshold > low) & (threshold < high)
        share = torch.where(open_, (threshold - low) / (high - low), 0.0)
        below = torch.where(open_, self._choose(torch.stack([share, 1 - share], 1), open_) == 0, threshold >= high)
        self.low[self.rows, column] = torch.where(open_ & ~below, threshold, low)
        self.high[self.rows, column] = torch.where(open_ & below, threshold, high)
        return below

    def pick(self, weights: Tensor) -> Tensor:
        total = weights.double().sum(1, keepdim=True)
        real = total[:, 0] > 0
        return torch.where(real, self._choose(weights.double() / total, real), -1)

    def draw(self, weights: Tensor, slot: int) -> Tensor:
        return torch.stack([self.pick(weights[:, w]) for w in range(weights.shape[1])], 1)

    def uniforms(self, nodes: int) -> None:
        """There are none: every outcome is taken."""

    def _column(self, coin: Tensor) -> Tensor:
        names, inverse = coin.unique(return_inverse=True)
        columns = torch.tensor([self.columns.setdefault(name, len(self.columns)) for name in names.tolist()])
        if (new := len(self.columns) - self.low.shape[1]) > 0:
            self.low = torch.nn.functional.pad(self.low, (0, new))
            self.high = torch.nn.functional.pad(self.high, (0, new), value=1.0)
        return columns[inverse]

    def _choose(self, chances: Tensor, active: Tensor) -> Tensor:
        """One of the outcomes of positive chance [R, K] for the rows that are `active` [R] -> [R]"""
        if not active.any():
            return torch.zeros_like(self.count)
        possible = chances > 0
        scripted = self._scripted()
        choice = torch.where(scripted >= 0, scripted, possible.long().argmax(1))
        self._note(possible & (active & (scripted < 0))[:, None], choice)
        width = int(torch.where(active, self.count, -1).max()) + 1
        if width > self.taken.shape[1]:
            self.taken = torch.nn.functional.pad(self.taken, (0, width - self.taken.shape[1]), value=-1)
        at = torch.where(active, self.count, 0)
        self.taken[self.rows, at] = torch.where(active, choice, self.taken[self.rows, at])
        self.weight = torch.where(
            active, self.weight * chances[self.rows, choice.clamp(max=chances.shape[1] - 1)], self.weight
        )
        self.count = self.count + active
        return choice

    def _scripted(self) -> Tensor:
        """What each row's script says next, -1 beyond its end -> [R]"""
        if not self.scripts.choices.shape[1]:
            return torch.full_like(self.count, -1)
        at = self.count.clamp(max=self.scripts.choices.shape[1] - 1)
        return torch.where(self.count == at, self.scripts.choices[self.rows, at], -1)

    def _note(self, possible: Tensor, choice: Tensor) -> None:
        """Keep for later what could have been chosen as well."""
        row, other = (possible & (torch.arange(possible.shape[1]) != choice[:, None])).nonzero(as_tuple=True)
        if len(row):
            padded = torch.nn.functional.pad(self.taken[row], (0, 1), value=-1)
            padded[torch.arange(len(row)), self.count[row]] = other
            self.untried.append(Scripts(padded, self.scripts.instance[row]))


class Table:
    """A law for every prefix of up to `horizon` tokens, for each instance: `laws` [I, (V+1)^horizon, V], indexed by the
    prefix in base V+1."""

    def __init__(self, laws: Tensor, horizon: int):
        self.laws, self.horizon, self.vocab = laws, horizon, laws.shape[-1]

    @staticmethod
    def random(vocab: int, horizon: int, generator: torch.Generator, zeros: float = 0.0) -> Table:
        """One instance: Dirichlet(1) rows in float64; each entry is 0 with probability `zeros`, though never a whole row."""
        weights = -torch.rand((vocab + 1) ** horizon, vocab, generator=generator, dtype=torch.float64).log()
        dead = torch.rand(weights.shape, generator=generator) < zeros
        dead[torch.arange(len(dead)), torch.randint(vocab, (len(dead),), generator=generator)] = False
        weights = weights.masked_fill(dead, 0.0)
        return Table((weights / weights.sum(-1, keepdim=True))[None], horizon)

    @staticmethod
    def stack(tables: list[Table]) -> Table:
        return Table(torch.cat([table.laws for table in tables]), tables[0].horizon)

    def __getitem__(self, instance: int) -> Table:
        return Table(self.laws[instance : instance + 1], self.horizon)

    def __len__(self) -> int:
        return len(self.laws)

    def one_hot(self) -> Table:
        """Temperature 0."""
        return Table(torch.nn.functional.one_hot(self.laws.argmax(-1), self.vocab).to(self.laws.dtype), self.horizon)

    def code(self, path: Tensor) -> Tensor:
        """Number of a prefix: path [..., D], -1 padded -> [...]"""
        path = path[..., : self.horizon]
        return ((path + 1) * (self.vocab + 1) ** torch.arange(path.shape[-1], device=path.device)).sum(-1)

    def at(self, path: Tensor, instance: Tensor) -> Tensor:
        """path [R, ..., D], instance [R] -> laws [R, ..., V]"""
        return self.laws[instance.view(-1, *[1] * (path.dim() - 2)), self.code(path)]

    def of(self, prefix: tuple[int, ...], instance: int = 0) -> Tensor:
        return self.laws[instance, int(self.code(torch.tensor(prefix, dtype=torch.long)))]

    def of_root(self) -> Tensor:
        """[I, V]"""
        return self.laws[:, 0]

    def sequences(self) -> Tensor:
        """All of them, in order [V^H, H]"""
        return torch.cartesian_prod(*[torch.arange(self.vocab)] * self.horizon).view(-1, self.horizon)

    def conditionals(self) -> Tensor:
        """The chance of each token of each sequence, given those before it [I, V^H, H]"""
        s = self.sequences()
        codes = [self.code(torch.where(torch.arange(self.horizon) < k, s, -1)) for k in range(self.horizon)]
        return torch.stack(
            [
                self.laws[:, code].gather(2, s[:, k].expand(len(self), -1)[..., None])[..., 0]
                for k, code in enumerate(codes)
            ],
            -1,
        )

    def law(self) -> Tensor:
        """Of all sequences [I, V^H]"""
        return self.conditionals().prod(-1)


class TableProbs:
    """p of a tree's nodes from a table."""

    def __init__(self, tree: Tree, table: Table, instance: Tensor):
        self.p = table.at(node_paths(tree.parent, tree.tokens, max(tree.levels, 1)), instance)

    def __call__(self, node: Tensor) -> Tensor:
        return self.p[torch.arange(len(node), device=node.device), node]

    def all(self) -> Tensor:
        return self.p


@dataclass(frozen=True)
class Outcomes:
    """What some rows emitted: `block` [R, H] tokens, -1 padded; `weight` [R] = the chance; rows whose verdict makes no sense (a
    path that is none, no next token) are not `sound` [R], and their chance is missing from every law."""

    instance: Tensor
    block: Tensor
    length: Tensor
    weight: Tensor
    sound: Tensor


Laws = Callable[[Tree, Table, Tensor], Probs]  # what the verifier sees of p


def outcomes(policy: TreePolicy, verifier: Verifier, p: Table, q: Table, laws: Laws = TableProbs) -> Iterator[Outcomes]:
    """All outcomes of one step, each once, for all instances of the tables p and q together."""
    pending = [Scripts.start(len(p))]
    while pending:
        now, pending = Scripts.join(pending).split(BATCH)
        rng = Enumerator(now)
        tree, verdict = step(policy, verifier, p, q, now.instance, rng, laws)
        pending += rng.untried
        yield emitted(tree, verdict, now.instance, rng.weight, policy.depth + 1)


def step(
    policy: TreePolicy, verifier: Verifier, p: Table, q: Table, instance: Tensor, rng: Rng, laws: Laws = TableProbs
) -> tuple[Tree, Verdict]:
    """One step from an empty past, by the shipped policy and verifier."""
    zero = torch.zeros_like(instance)
    start = Step(zero, zero, zero, zero == 0, zero + 99, zero[:, None], rng, extent=0)

    def ask(frontier: Frontier) -> tuple[Tensor, Tensor | None]:
        law = q.at(frontier.path, instance)
        return law.log().float(), None if policy.temperature is None else law

    tree = policy.grow(start, ask)
    return tree, verifier.verify(tree, laws(tree, p, instance), rng)


def emitted(tree: Tree, verdict: Verdict, instance: Tensor, weight: Tensor, horizon: int) -> Outcomes:
    place = torch.arange(horizon, device=tree.tokens.device)
    path = torch.nn.functional.pad(verdict.path, (0, horizon), value=-1)[:, : horizon + 1]
    last = verdict.length[:, None] - 1
    drafted = tree.tokens.gather(1, path[:, 1:].clamp(min=0))
    block = torch.where(place < last, drafted, torch.where(place == last, verdict.next_token[:, None], -1))
    above = tree.parent.gather(1, path[:, 1:].clamp(min=0))
    linked = (path[:, 1:] >= 0) & (above == path[:, :-1]) & tree.valid.gather(1, path[:, 1:].clamp(min=0))
    sound = (path[:, 0] == 0) & (linked | (place >= last)).all(1) & (verdict.next_token >= 0)
    return Outcomes(instance, block, verdict.length, weight, sound)


def completed_laws(policy: TreePolicy, verifier: Verifier, p: Table, q: Table) -> Tensor:
    """The law [I, V^H] of the first H = depth + 1 tokens when one step of speculation is continued with draws from p."""
    return complete(p, outcomes(policy, verifier, p, q))


def complete(p: Table, parts: Iterator[Outcomes]) -> Tensor:
    mass = torch.zeros(p.laws.shape[:2], dtype=torch.float64)  # of each block, by its number
    for part in parts:
        weight = torch.where(part.sound, part.weight, 0.0)
        mass.index_put_((part.instance, p.code(part.block.clamp(max=p.vocab - 1))), weight, accumulate=True)
    s, chance = p.sequences(), p.conditionals().double()
    law = torch.zeros(len(p), len(s), dtype=torch.float64)
    for k in range(1, p.horizon + 1):
        blocks = p.code(torch.where(torch.arange(p.horizon) < k, s, -1))
        law += mass[:, blocks] * chance[..., k:].prod(-1)
    return law


def mean_length(policy: TreePolicy, verifier: Verifier, p: Table, q: Table) -> Tensor:
    """Expected tokens of one step [I]"""
    mean = torch.zeros(len(p), dtype=torch.float64)
    for part in outcomes(policy, verifier, p, q):
        mean.index_add_(0, part.instance, part.weight * part.length)
    return mean


def total_variations(laws: Tensor, p: Table) -> Tensor:
    """Half the absolute difference between the laws [I, V^H] and p's own -> [I]"""
    return 0.5 * (laws - p.law()).abs().sum(1)
