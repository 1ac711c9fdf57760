"""Planted faults, each of which looks plausible and biases the output, and correct variants that look suspicious.

A mutant is a verifier and a tree policy that pass for a pair of honest ones.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from specresearch.kernels import block as block_kernel
from specresearch.kernels.spectr import KSeqRule
from specresearch.kernels.traversal import Stack, traversal
from specresearch.kernels.tree import links
from specresearch.kernels.verify import DrawnRule, MatchRule, TargetOnlyRule, walk
from specresearch.trees.static import Chain, StaticTree
from specresearch.types import Tree, TreePolicy, Verdict, Verifier
from specresearch.verifiers.block import Block
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch
from specresearch.verifiers.target_only import TargetOnly
from specresearch.verifiers.traversal import Traversal

CHAIN = Chain(depth=2, temperature=1, draw="iid")


def wide(draw: str, *widths: int) -> StaticTree:
    return StaticTree(temperature=1, draw=draw, widths=list(widths))


class Rule(Verifier):
    """A walk by a rule made from (p, tree, rng)."""

    def __init__(self, make: Callable):
        self.make = make

    def verify(self, tree, p, rng):
        return walk(tree, self.make(p, tree, rng), rng)


class Changed(TreePolicy):
    """A policy whose trees are tampered with after they were grown."""

    def __init__(self, policy: TreePolicy, change: Callable[[Tree], Tree]):
        self.policy, self.change = policy, change
        for name in ("size", "depth", "width", "law", "growth", "temperature"):
            setattr(self, name, getattr(policy, name))

    def grow(self, step, ask):
        return self.change(self.policy.grow(step, ask))


def heated(law, temperature):
    law = law ** (1 / temperature)
    return law / law.sum(-1, keepdim=True)


# -- acceptance and residual ---------------------------------------------------------------------------------------------


class OtherThreshold:
    """An `Rng` whose acceptance thresholds are changed."""

    def __init__(self, rng, change):
        self.rng, self.change, self.pick = rng, change, rng.pick

    def accept(self, coin, threshold):
        return self.rng.accept(coin, self.change(threshold))


class SquareRoot(DrawnRule):
    def accept(self, child, token, trying, rng):
        return super().accept(child, token, trying, OtherThreshold(rng, lambda t: t.clamp(min=0).sqrt()))


class ResampleFromP(DrawnRule):
    """The residual is forgotten: p itself after a rejection."""

    def accept(self, child, token, trying, rng):
        before = self.residual
        ok = super().accept(child, token, trying, rng)
        self.residual = before
        return ok


class SharedCoin(DrawnRule):
    """One coin for all children of a node, in a rule that needs a fresh one for each."""

    def accept(self, child, token, trying, rng):
        return super().accept(torch.zeros_like(child), token, trying, rng)


class SampleOrRatio(DrawnRule):
    """Accept where a sample of the target equals the draft, or else by the ratio."""

    def accept(self, child, token, trying, rng):
        equal = rng.pick(torch.where(trying[:, None], self.residual, 0.0)) == token
        return trying & (super().accept(child, token, trying & ~equal, rng) | equal)


class WithReplacementRule(DrawnRule):
    """Children drawn without replacement, judged as if they were iid."""

    def __init__(self, p, tree):
        super().__init__(p, tree)
        self.without_replacement = False


class SampledAgain(MatchRule):
    """On a mismatch another sample is given than the one that was compared."""

    def finish(self, rng):
        return rng.pick(self.law)

    def enter(self, node, moving):
        super().enter(node, moving)
        self.law = self.rows(node)


class HotTarget(Verifier):
    """The temperature is applied to p here and nowhere else; with `leaves`, to the bonus after a whole branch alone."""

    def __init__(self, leaves: bool):
        self.leaves = leaves

    def verify(self, tree, p, rng):
        inner = links(tree.parent, tree.valid)[0] >= 0
        rows = torch.arange(len(tree.tokens))

        def law(node):
            cold = (inner[rows, node] & self.leaves)[:, None]
            return torch.where(cold, p(node), heated(p(node), 0.6))

        return walk(tree, DrawnRule(law, tree), rng)


def claims_other_q(tree: Tree) -> Tree:
    """Drafted at one temperature, judged by the q of another."""
    return replace(tree, q=heated(tree.q, 0.6).nan_to_num(0.0))


def argmax_with_softmax_q() -> TreePolicy:
    policy = Chain(depth=2, temperature=1, draw="iid")
    policy.draw = "topk"  # deterministic children, while law and q still claim a draw
    return policy


# -- trees changed after the draw ----------------------------------------------------------------------------------------


def sorted_by_q(tree: Tree) -> Tree:
    """Siblings below the root in order of probability, no longer in the order of the draw."""
    chance = tree.q[:, 0].gather(1, tree.tokens[:, 1:]).masked_fill(~tree.valid[:, 1:], -1)
    order = 1 + chance.argsort(1, descending=True)
    order = torch.cat([torch.zeros_like(order[:, :1]), order], 1)
    return replace(tree, tokens=tree.tokens.gather(1, order), valid=tree.valid.gather(1, order))


def reranked(tree: Tree) -> Tree:
    """Only the more probable of two drawn siblings is kept."""
    tree = sorted_by_q(tree)
    return replace(tree, valid=tree.valid & (torch.arange(tree.valid.shape[1]) < 2))


def unlikely(tree: Tree) -> torch.Tensor:
    """Drafts that q gave less than 0.3 [B, N]"""
    q = tree.q[torch.arange(len(tree.tokens))[:, None], tree.parent.clamp(min=0), tree.tokens]
    return (q < 0.3) & (tree.parent >= 0)


def below(tree: Tree, cut: torch.Tensor) -> Tree:
    """A chain without the nodes that are `cut` [B, N], and all below them."""
    return replace(tree, valid=tree.valid & (cut.long().cumsum(1) == 0))


def drops_unlikely(tree: Tree) -> Tree:
    return below(tree, unlikely(tree))


def keeps_unlikely_and_stops(tree: Tree) -> Tree:
    return below(tree, torch.nn.functional.pad(unlikely(tree)[:, :-1], (1, 0)))


def without_duplicates(tree: Tree) -> Tree:
    same = (tree.tokens[:, None] == tree.tokens[:, :, None]) & (tree.parent[:, None] == tree.parent[:, :, None])
    return replace(tree, valid=tree.valid & ~same.tril(-1).any(-1))


def called(law: str) -> Callable[[Tree], Tree]:
    return lambda tree: replace(tree, law=law)


# -- block, traversal, K-SEQ ---------------------------------------------------------------------------------------------


class FirstUnfit:
    """An `Rng` for block verification that lets nothing be fit after the first that was not."""

    def __init__(self, rng):
        self.rng, self.pick, self.fine = rng, rng.pick, True

    def accept(self, coin, threshold):
        self.fine = self.rng.accept(coin, torch.where(torch.as_tensor(self.fine), threshold, 0.0))
        return self.fine


class StopsAtFirstUnfit(Block):
    def verify(self, tree, p, rng):
        return block_kernel.block(tree, p, FirstUnfit(rng))


class TokenResidual(Block):
    """Block's choice of the length, but the residual of a single token: (p - q)+ instead of (w p - q)+."""

    def verify(self, tree, p, rng):
        verdict = block_kernel.block(tree, p, OnlyCoins(rng))
        rows = torch.arange(len(tree.tokens))
        node = verdict.path[rows, verdict.length - 1]
        ends = links(tree.parent, tree.valid)[0][rows, node] < 0
        rest = (p(node) - tree.q[rows, node]).clamp(min=0)
        rest = torch.where((ends | (rest.sum(1) <= 0))[:, None], p(node), rest)
        return Verdict(verdict.path, verdict.length, rng.pick(rest))


class OnlyCoins:
    def __init__(self, rng):
        self.accept = rng.accept

    def pick(self, weights):
        return weights[:, 0].long() * 0


class WrongRatio(Stack):
    """Z instead of Z / (Z + 1 - a)"""

    def mended(self, mass, chance):
        return torch.where(self.depth > 0, mass, 1.0)


class NotMended(Stack):
    """A node's chance stays what it was when it was reached."""

    def mended(self, mass, chance):
        return chance


class TraversalWith(Traversal):
    def __init__(self, state):
        self.state = state

    def verify(self, tree, p, rng):
        return traversal(tree, p, rng, self.state)


class LowRho(KSeqRule):
    def solve(self, p, q, count):
        return torch.ones_like(count, dtype=torch.float64)


class HighRho(KSeqRule):
    def solve(self, p, q, count):
        return count.double()


MUTANTS: dict[str, tuple[Verifier, TreePolicy]] = {
    "square root of the ratio": (Rule(lambda p, tree, rng: SquareRoot(p, tree)), CHAIN),
    "resample from p": (Rule(lambda p, tree, rng: ResampleFromP(p, tree)), CHAIN),
    "one coin for all siblings": (Rule(lambda p, tree, rng: SharedCoin(p, tree)), wide("iid", 3)),
    "sample or ratio": (Rule(lambda p, tree, rng: SampleOrRatio(p, tree)), CHAIN),
    "sampled again on a mismatch": (Rule(lambda p, tree, rng: SampledAgain(p, rng)), CHAIN),
    "temperature on p alone": (HotTarget(leaves=False), CHAIN),
    "temperature on q alone": (Rejection(), Changed(CHAIN, claims_other_q)),
    "bonus unwarped": (HotTarget(leaves=True), CHAIN),
    "argmax drafts with softmax q": (Rejection(), argmax_with_softmax_q()),
    "without replacement, judged iid": (
        Rule(lambda p, tree, rng: WithReplacementRule(p, tree)),
        wide("without_replacement", 2, 2),
    ),
    "siblings sorted by q": (Rejection(), Changed(wide("without_replacement", 2), sorted_by_q)),
    "sampled tree re-ranked": (Rejection(), Changed(wide("without_replacement", 2), reranked)),
    "re-ranked, traversal": (Traversal(), Changed(wide("without_replacement", 2), reranked)),
    "duplicates dropped, judged iid": (Rejection(), Changed(wide("iid", 2), without_duplicates)),
    "duplicates counted twice": (
        Rule(lambda p, tree, rng: TargetOnlyRule(p, 1.0, 1.0, repeats=True)),
        Changed(wide("iid", 2), called("point")),
    ),
    "unlikely draft dropped": (Rejection(), Changed(CHAIN, drops_unlikely)),
    "unlikely draft dropped, block": (Block(), Changed(CHAIN, drops_unlikely)),
    "block: stop at the first unfit": (StopsAtFirstUnfit(), CHAIN),
    "block: residual of one token": (TokenResidual(), CHAIN),
    "traversal: wrong ratio": (TraversalWith(WrongRatio), wide("without_replacement", 2, 2)),
    "traversal: chances not mended": (TraversalWith(NotMended), CHAIN),
    "K-SEQ: rho below the solution": (Rule(lambda p, tree, rng: LowRho(p, tree)), wide("iid", 2)),
}

CONTROLS: dict[str, tuple[Verifier, TreePolicy]] = {
    "sample and match on drawn children": (SampleAndMatch(), wide("iid", 2, 1)),
    "point mass on duplicates": (Rejection(), Changed(wide("iid", 2), called("point"))),
    "target only on duplicates": (TargetOnly(), Changed(wide("iid", 2), called("point"))),
    "duplicates dropped, judged without replacement": (
        Rejection(),
        Changed(wide("iid", 2), lambda tree: replace(without_duplicates(tree), law="without_replacement")),
    ),
    "re-ranked, judged as points": (
        Rejection(),
        Changed(wide("without_replacement", 2), lambda tree: replace(reranked(tree), law="point")),
    ),
    "unlikely draft kept, then stop": (Rejection(), Changed(CHAIN, keeps_unlikely_and_stops)),
    "unlikely draft kept, then stop, block": (Block(), Changed(CHAIN, keeps_unlikely_and_stops)),
    "unlikely draft kept, then stop, traversal": (Traversal(), Changed(CHAIN, keeps_unlikely_and_stops)),
    "unlikely draft dropped, sample and match": (SampleAndMatch(), Changed(CHAIN, drops_unlikely)),
    "K-SEQ: rho = k": (Rule(lambda p, tree, rng: HighRho(p, tree)), wide("iid", 2)),
}
