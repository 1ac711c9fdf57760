"""The float32 kernels, as they run, on a net of fixed uniforms; coarser than the enumeration, but nothing is replaced."""

import pytest
import torch
from mutants import MUTANTS

from specresearch.kernels import backend
from specresearch.lossless.exact import shapes, shapes_for
from specresearch.lossless.grid import RESOLUTION, grid
from specresearch.verifiers.block import Block
from specresearch.verifiers.greedy import Greedy
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch
from specresearch.verifiers.spectr import SpecTr
from specresearch.verifiers.target_only import TargetOnly
from specresearch.verifiers.traversal import Traversal
from specresearch.verifiers.typical import Typical

RULES = [Rejection(), Greedy(), TargetOnly(), SampleAndMatch(), Block(), Traversal(), SpecTr()]
SHAPES = ["chain iid", "wide iid", "2x2 without_replacement", "best-first without_replacement", "dynamic topk"]
CASES = [(rule, shape) for rule in RULES for shape in shapes_for(rule) if shape in SHAPES]
SMALL = {"one coin for all siblings", "duplicates dropped, judged iid", "block: residual of one token"}  # TV below 0.03


@pytest.mark.parametrize(("verifier", "shape"), CASES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_the_law_on_the_net_is_the_targets(verifier, shape):
    found = grid(verifier, shapes()[shape], shape)
    assert found.verdict == "agrees" and found.kernels == "torch" and found.instances == 6


@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - SMALL))
def test_planted_faults_are_seen(name):
    verifier, policy = MUTANTS[name]
    found = grid(verifier, policy, name)
    assert found.worst > 2 * RESOLUTION and found.verdict == "biased"


def test_lossy_rules_are_called_so():
    assert grid(Typical(), shapes()["2x2 topk"], "2x2 topk").verdict == "lossy"


@pytest.mark.skipif(backend.triton is None, reason="Triton is not installed")
def test_triton_on_the_net(triton):
    """On a GPU the law; in the interpreter, where a row takes long, a few points must fall as they do for torch."""
    gpu = torch.cuda.is_available()
    how = {"device": "cuda"} if gpu else {"points": 4}
    found = grid(Rejection(), shapes()["chain iid"], "chain iid", **how)
    assert found.kernels == "triton"
    if gpu:
        assert found.worst < RESOLUTION
    else:
        backend.use(name="torch")
        assert found.worst == pytest.approx(
            grid(Rejection(), shapes()["chain iid"], "chain iid", **how).worst, abs=1e-9
        )
