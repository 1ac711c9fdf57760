"""What the rules keep, in closed form, against the enumeration of the shipped code."""

import pytest
import torch
from mutants import wide

from specresearch.lossless import expected
from specresearch.lossless.enumeration import Table, mean_length
from specresearch.trees.static import Chain
from specresearch.verifiers.block import Block
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch
from specresearch.verifiers.spectr import SpecTr
from specresearch.verifiers.target_only import TargetOnly
from specresearch.verifiers.traversal import Traversal

COUNT = 6


def tables(depth, zeros=0.0):
    g = torch.Generator().manual_seed(depth)
    return [Table.stack([Table.random(3, depth + 1, g, zeros) for _ in range(COUNT)]) for _ in range(2)]


@pytest.mark.parametrize(
    ("verifier", "draw", "formula"),
    [
        (Rejection(), "iid", expected.rejection),
        (Rejection(), "without_replacement", expected.without_replacement),
        (Traversal(), "without_replacement", expected.without_replacement),
        (SampleAndMatch(), "iid", expected.sample_and_match),
        (SpecTr(), "iid", expected.spectr),
        (Rejection(), "topk", lambda p, q, k: expected.point(p, q.topk(k).indices.tolist())),
        (TargetOnly(), "topk", lambda p, q, k: expected.point(p, q.topk(k).indices.tolist())),
        (SampleAndMatch(), "topk", lambda p, q, k: expected.point(p, q.topk(k).indices.tolist())),
    ],
)
@pytest.mark.parametrize("children", [1, 2])
def test_children_of_one_node(verifier, draw, formula, children):
    p, q = tables(1)
    if children == 1 and draw == "without_replacement":
        draw = "iid"
    found = mean_length(wide(draw, children), verifier, p, q) - 1
    wanted = [formula(p.of((), i), q.of((), i), children) for i in range(COUNT)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("verifier", "formula"),
    [(Rejection(), expected.chain), (Block(), expected.block), (Traversal(), expected.block)],
)
@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_chains(verifier, formula, zeros):
    p, q = tables(3, zeros)
    found = mean_length(Chain(depth=3, temperature=1), verifier, p, q) - 1
    wanted = [formula(lambda s, i=i: p.of(s, i), lambda s, i=i: q.of(s, i), 3, 3) for i in range(COUNT)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-9)


def test_the_example_of_the_paper():
    """Two tokens, p = 1/3 2/3 and q = 2/3 1/3 whatever came before: 10/9 by tokens, 11/9 by blocks."""
    p, q = (lambda s, law=law: torch.tensor(law) / 3 for law in ([1.0, 2.0], [2.0, 1.0]))
    assert expected.chain(p, q, 2, 2) == pytest.approx(10 / 9, abs=1e-6)
    assert expected.block(p, q, 2, 2) == pytest.approx(11 / 9, abs=1e-6)


def test_what_is_known_of_the_order():
    p, q = tables(1)
    for i in range(COUNT):
        one, other = p.of((), i), q.of((), i)
        assert expected.rejection(one, other) >= expected.sample_and_match(one, other)
        assert expected.rejection(one, other) == pytest.approx(expected.spectr(one, other, 1))
        assert expected.rejection(one, one, 2) == expected.spectr(one, one, 3) == pytest.approx(1)
        assert expected.point(one, [0, 0, 2]) == pytest.approx(1 - float(one[1]))
