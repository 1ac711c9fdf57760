"""Every verifier's law by enumeration on three tokens: the shipped code, every random outcome, against p to 1e-12."""

from dataclasses import replace

import pytest
import torch
from mutants import CHAIN, CONTROLS, MUTANTS, wide

from specresearch.lossless.enumeration import (
    Enumerator,
    Scripts,
    Table,
    complete,
    completed_laws,
    outcomes,
    total_variations,
)
from specresearch.lossless.exact import cell_of, certificates, certify, instances, shapes, shapes_for
from specresearch.types import Verdict, Verifier
from specresearch.verifiers.block import Block
from specresearch.verifiers.greedy import Greedy
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch
from specresearch.verifiers.spectr import SpecTr
from specresearch.verifiers.target_only import TargetOnly
from specresearch.verifiers.traversal import Traversal
from specresearch.verifiers.typical import Typical

LOSSLESS = [Rejection(), Greedy(), TargetOnly(), SampleAndMatch(), Block(), Traversal(), SpecTr()]
CASES = [(verifier, shape) for verifier in LOSSLESS for shape in shapes_for(verifier)]


@pytest.mark.parametrize(("verifier", "shape"), CASES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_every_rule_is_exact_on_every_tree_that_it_declares(verifier, shape):
    found = certify(verifier, shapes()[shape], shape, least=12)
    assert found.worst < 1e-12 and found.verdict == "exact" and found.counter_example is None
    assert (found.cells, found.all_cells) == (12, 12) and found.instances >= 19


@pytest.mark.parametrize("verifier", [Rejection(), TargetOnly(), SampleAndMatch()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("shape", ["2x2 topk", "chain topk"])
def test_point_mass_p_is_exact(verifier, shape):
    """Temperature 0: p is one-hot, every rule becomes greedy."""
    p, q = instances(3, 3, 12, torch.Generator().manual_seed(0))
    laws = completed_laws(shapes()[shape], verifier, p.one_hot(), q)
    assert float(total_variations(laws, p.one_hot()).max()) < 1e-12


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_seen(name):
    verifier, policy = MUTANTS[name]
    found = certify(verifier, policy, name, least=12)
    assert found.worst > 1e-3 and found.verdict == "biased" and "wanted" in found.counter_example


@pytest.mark.parametrize("name", CONTROLS)
def test_correct_variants_pass(name):
    verifier, policy = CONTROLS[name]
    assert certify(verifier, policy, name, least=12).worst < 1e-12


# -- lossy rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("single", "acc"), [(1.0, 0.7), (0.5, 1.0), (0.5, 0.7), (0.8, 0.6)])
def test_the_bound_of_target_only_holds_and_is_reached(single, acc):
    verifier = TargetOnly(threshold_single=single, threshold_acc=acc)
    bound = 1 - min(single, acc)
    assert verifier.tv_bound == pytest.approx(bound) and f"{bound:.3g}" in verifier.lossy
    g = torch.Generator().manual_seed(0)
    p, q = (Table.stack([Table.random(3, 2, g) for _ in range(400)]) for _ in range(2))
    laws = completed_laws(wide("topk", 3), verifier, p, q).view(400, 3, 3).sum(2)
    distance = 0.5 * (laws - p.of_root()).abs().sum(1)
    assert 0.8 * bound < float(distance.max()) <= bound + 1e-12


def test_lossy_rules_are_called_so():
    found = certify(Typical(), shapes()["2x2 topk"], "2x2 topk", least=12)
    assert found.verdict == "lossy" and found.worst > 0.1 and found.counter_example


# -- a user's own --------------------------------------------------------------------------------------------------------


class FirstChild(Verifier):
    """Accepts the first child blindly."""

    laws = frozenset({"point"})

    def verify(self, tree, p, rng):
        zero = torch.zeros_like(tree.tokens[:, 0])
        path = torch.full((len(zero), tree.levels + 1), -1)
        path[:, 0], path[:, 1] = 0, 1
        return Verdict(path, zero + 2, rng.pick(p(zero + 1)))


class NoPath(SampleAndMatch):
    """The right tokens, but a path that leads nowhere: the wrong K and V would be kept."""

    def verify(self, tree, p, rng):
        verdict = super().verify(tree, p, rng)
        return replace(verdict, path=torch.where(verdict.path > 0, verdict.path - 1, verdict.path))


def test_a_rule_of_the_users_own():
    found = list(certificates(FirstChild(), least=12))
    assert {c.law for c in found} == {"point"} and {c.verdict for c in found} == {"biased"}
    assert found[0].rule == "test_law" and "p = " in found[0].counter_example
    assert certify(NoPath(), CHAIN, "chain", least=12).worst > 0.01


# -- the instrument itself -----------------------------------------------------------------------------------------------


def test_cells():
    p, q = instances(2, 3, 40, torch.Generator().manual_seed(1))
    cells = cell_of(p.of_root(), q.of_root())
    assert len(cells[cells >= 0].unique()) == 12 and (cells[:40] >= 0).all()
    assert (p.laws == q.laws).flatten(1).all(1).sum() >= 3 and (p.laws == 0).any()
    assert torch.allclose(p.laws.sum(-1), torch.ones(()).double())


def test_all_outcomes_add_up_to_one():
    p, q = instances(3, 3, 12, torch.Generator().manual_seed(2))
    parts = list(outcomes(shapes()["best-first iid"], Rejection(), p, q))
    total = torch.zeros(len(p), dtype=torch.float64)
    for part in parts:
        total.index_add_(0, part.instance, part.weight)
    assert torch.allclose(total, torch.ones_like(total), atol=1e-12)
    assert torch.allclose(complete(p, iter(parts)).sum(1), total, atol=1e-12)


def test_a_coin_that_is_asked_again_keeps_what_it_showed():
    """u < 1/2 is followed by u < 1/4 with chance 1/2, and never by u >= 3/4."""
    pending, found = [Scripts.start(1)], {}
    while pending:
        rng = Enumerator(Scripts.join(pending))
        answers = [rng.accept(7, torch.full((len(rng.rows),), t)) for t in (0.5, 0.25, 0.75)]
        for row, weight in enumerate(rng.weight.tolist()):
            found[tuple(bool(a[row]) for a in answers)] = weight
        pending = rng.untried
    assert found == {(True, True, True): 0.25, (True, False, True): 0.25, (False, False, True): 0.25,
                     (False, False, False): 0.25}  # fmt: skip
