"""Every verifier's law by enumeration on three tokens: the shipped code, every random outcome, against p to 1e-12."""

import pytest
import torch

from specresearch.kernels.verify import DrawnRule, TargetOnlyRule, walk
from specresearch.lossless.exact import Table, completed_law, total_variation
from specresearch.trees.best_first import BestFirstTree
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.static import Chain, StaticTree
from specresearch.types import Verifier
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.target_only import TargetOnly

V = 3


def policies():
    for draw in ("topk", "iid"):
        yield f"chain-{draw}", Chain(depth=2, temperature=1, draw=draw)
    for draw in ("topk", "without_replacement", "iid"):
        yield f"wide-{draw}", StaticTree(temperature=1, draw=draw, widths=[3])
        yield f"2x2-{draw}", StaticTree(temperature=1, draw=draw, widths=[2, 2])
        yield f"best-first-{draw}", BestFirstTree(size=4, depth=2, topk=2, temperature=1, draw=draw)
        yield f"dynamic-{draw}", DynamicTree(size=4, depth=2, topk=2, temperature=1, draw=draw)


POLICIES = dict(policies())


def tables(seed: int, policy) -> tuple[Table, Table]:
    generator = torch.Generator().manual_seed(seed)
    zeros = 0.3 if seed % 3 == 2 else 0.0
    p = Table.random(V, policy.depth + 1, generator, zeros)
    q = p if seed % 5 == 4 else Table.random(V, policy.depth + 1, generator, zeros)
    return p, q


def worst(policy, verifier, seeds=range(6)) -> float:
    return max(total_variation(completed_law(policy, verifier, p, q), p) for p, q in (tables(s, policy) for s in seeds))


@pytest.mark.parametrize("name", POLICIES)
def test_rejection_is_exact(name):
    seeds = range(5) if "2x2-" in name else range(10)
    assert worst(POLICIES[name], Rejection(), seeds) < 1e-12


@pytest.mark.parametrize("name", POLICIES)
def test_target_only_is_exact(name):
    assert worst(POLICIES[name], TargetOnly(), range(4)) < 1e-12


@pytest.mark.parametrize("name", ["2x2-topk", "chain-topk"])
def test_point_mass_p_is_exact(name):
    """Temperature 0: p is one-hot, every rule becomes greedy."""
    from specresearch.verifiers.greedy import Greedy

    generator = torch.Generator().manual_seed(0)
    policy = POLICIES[name]
    for _ in range(5):
        p = Table.random(V, policy.depth + 1, generator)
        p.laws = torch.nn.functional.one_hot(p.laws.argmax(-1), V).double()
        q = Table.random(V, policy.depth + 1, generator)
        for verifier in (Rejection(), TargetOnly(), Greedy()):
            assert total_variation(completed_law(policy, verifier, p, q), p) < 1e-12


# -- planted faults: the exact check must see each of them --------------------------------------------------------------


class Fault(Verifier):
    def __init__(self, rule):
        self.rule = rule

    def verify(self, tree, p, rng):
        return walk(tree, self.rule(p, tree), rng)


class WithReplacementRule(DrawnRule):
    """Children drawn without replacement, judged as if they were iid."""

    def __init__(self, p, tree):
        super().__init__(p, tree)
        self.without_replacement = False


class ResampleFromP(DrawnRule):
    """The residual is forgotten: p itself after a rejection."""

    def accept(self, child, token, trying, rng):
        before = self.residual
        ok = super().accept(child, token, trying, rng)
        self.residual = before
        return ok


class SquareRoot(DrawnRule):
    def accept(self, child, token, trying, rng):
        rng_accept = rng.accept
        rng.accept = lambda coin, threshold: rng_accept(coin, threshold.clamp(min=0).sqrt())
        try:
            return super().accept(child, token, trying, rng)
        finally:
            rng.accept = rng_accept


class SharedCoin(DrawnRule):
    """One coin for all children of a node, in a rule that needs a fresh one for each."""

    def accept(self, child, token, trying, rng):
        return super().accept(torch.zeros_like(child), token, trying, rng)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("2x2-without_replacement", WithReplacementRule),
        ("chain-iid", ResampleFromP),
        ("chain-iid", SquareRoot),
        ("wide-iid", SharedCoin),
    ],
)
def test_planted_faults_are_seen(name, rule):
    assert worst(POLICIES[name], Fault(rule)) > 1e-3


def test_softmax_q_for_topk_children_is_seen():
    """Re-ranked or top-k children must not be judged by the q that ranked them."""
    policy = StaticTree(temperature=1, draw="iid", widths=[1, 1])
    policy.draw = "topk"  # deterministic children, while law and q still claim a draw
    assert worst(policy, Rejection()) > 0.05


class CountsDuplicates(TargetOnlyRule):
    """A repeated sibling adds its mass to the running sum again."""

    def __init__(self, p, tree):
        super().__init__(p, 1.0, 1.0, repeats=True)


def test_duplicate_siblings():
    policy = StaticTree(temperature=1, draw="iid", widths=[2])
    policy.law = "point"
    assert worst(policy, Rejection()) < 1e-12
    assert worst(policy, TargetOnly()) < 1e-12
    assert worst(policy, Fault(CountsDuplicates)) > 1e-3
