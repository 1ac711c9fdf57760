"""Triton against the torch reference: bit for bit where integers, to rounding where floats. On a GPU compiled, else in
Triton's interpreter. (SGLang's functions have a reference of their own in test_sglang.py, attention in test_attention.py.)"""

import math
import os
import platform
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from helpers import decode
from hypothesis import given, settings
from hypothesis import strategies as st

from specresearch.drafters.small_lm import SmallLM
from specresearch.kernels import backend, cache, mask, sampling, sglang, tree, verify
from specresearch.models import tiny
from specresearch.sampling import Sampler
from specresearch.trees.static import StaticTree
from specresearch.types import Tree, UserError

pytestmark = pytest.mark.skipif(backend.triton is None, reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = DEVICE == "cuda"
FEW = settings(max_examples=25, deadline=None)
INTERPRETED = settings(max_examples=60 if GPU else 5, deadline=None)  # the interpreter takes a second a call
seeds = st.integers(0, 10**6)


@contextmanager
def on(name):
    backend.use(name=name)
    try:
        yield
    finally:
        backend.use(name="auto")


def both(function):
    with on("torch"):
        reference = function()
    with on("triton"):
        return reference, function()


def random_parent(generator, batch, nodes, kind="any"):
    """Parent pointers [B, N]: trees, chains, stars, or anything at all."""
    rows = []
    for _ in range(batch):
        if kind == "wild":
            rows.append([-1, *torch.randint(-2, nodes + 2, (nodes - 1,), generator=generator).tolist()])
        elif kind == "any":
            rows.append([-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes)])
        else:
            rows.append([-1] + [i - 1 if kind == "chain" else 0 for i in range(1, nodes)])
    return torch.tensor(rows, device=DEVICE)


def brute_structure(parent, valid, hops):
    """Ancestor sets, counts and child lists of one row, by walking."""
    nodes = len(parent)
    seen, count = [], []
    for node in range(nodes):
        at, path = node, []
        while 0 <= at < nodes and len(path) < hops:
            path.append(at)
            at = parent[at]
        seen.append({*path})
        count.append(len(path))
    children = {i: [c for c in range(1, nodes) if parent[c] == i and valid[c]] for i in range(nodes)}
    first = [children[i][0] if children[i] else -1 for i in range(nodes)]
    after = [-1] * nodes
    for line in children.values():
        for one, other in pairwise(line):
            after[one] = other
    return seen, count, first, after


# -- tree and mask -------------------------------------------------------------------------------------------------------


@FEW
@given(st.integers(1, 3), st.integers(1, 40), st.sampled_from(["any", "chain", "star", "wild"]), seeds, st.booleans())
def test_structure(batch, nodes, kind, seed, all_valid):
    g = torch.Generator().manual_seed(seed)
    parent = random_parent(g, batch, nodes, kind)
    valid = (torch.rand(batch, nodes, generator=g) > (-1 if all_valid else 0.3)).to(DEVICE)
    hops = int(torch.randint(1, nodes + 1, (1,), generator=g))
    (words, triton_words) = both(lambda: tree.ancestor_words(parent, hops - 1))
    assert torch.equal(words, triton_words)
    cells, count = tree.climb(parent, hops)
    assert torch.equal(mask.unpack(words, nodes), cells)
    links, triton_links = both(lambda: tree.links(parent, valid))
    assert torch.equal(links[0], triton_links[0]) and torch.equal(links[1], triton_links[1])
    for row in range(batch):
        seen, counts, first, after = brute_structure(parent[row].tolist(), valid[row].tolist(), hops)
        assert [set(line.nonzero()[:, 0].tolist()) for line in cells[row]] == seen
        assert count[row].tolist() == counts
        assert links[0][row].tolist() == first and links[1][row].tolist() == after


def test_a_thousand_nodes():
    g = torch.Generator().manual_seed(0)
    for kind in ("chain", "star", "any"):
        parent = random_parent(g, 1, 1024, kind)
        cells = tree.ancestors(parent)
        seen, _, first, after = brute_structure(parent[0].tolist(), [True] * 1024, 1024)
        assert [set(line.nonzero()[:, 0].tolist()) for line in cells[0]] == seen
        assert [x[0].tolist() for x in tree.links(parent)] == [first, after]
        assert torch.equal(mask.unpack(mask.pack(cells), 1024), cells)


@FEW
@given(st.integers(1, 3), st.integers(1, 30), seeds)
def test_there_and_back(batch, nodes, seed):
    """Parents are found again in masks and in links, and paths end at their nodes."""
    parent = random_parent(torch.Generator().manual_seed(seed), batch, nodes)
    assert torch.equal(tree.parents_of_mask(tree.ancestors(parent)), parent)
    assert torch.equal(tree.parents_of_links(*tree.links(parent)), parent)
    depth = tree.depths(parent)
    paths = tree.paths(parent, nodes)
    node = torch.arange(nodes, device=DEVICE)
    assert (paths.gather(-1, depth[..., None])[..., 0] == node).all()
    assert (paths[..., 0] == 0).all() and ((paths >= 0).sum(-1) == depth + 1).all()
    up = paths.gather(-1, (depth - 1).clamp(min=0)[..., None])[..., 0]
    assert torch.equal(torch.where(depth > 0, up, -1), parent)
    leaf = tree.leaf_paths(parent, torch.ones_like(parent, dtype=torch.bool), nodes)[..., 0] >= 0
    assert torch.equal(leaf, ~(parent[:, None] == node[:, None]).any(-1))


def test_parents_of_a_link_loop_end():
    first, sibling = torch.tensor([[1, 0, -1]]), torch.tensor([[-1, 1, 7]])
    assert tree.parents_of_links(first, sibling).shape == (1, 3)


@pytest.mark.parametrize("nodes", [1, 7, 8, 9, 16, 17, 31, 32, 33, 64, 100, 1024])
def test_packing(nodes):
    cells = torch.rand(3, nodes, nodes) > 0.5
    packed = mask.pack(cells)
    wide = next((d for n, d in ((8, torch.uint8), (16, torch.uint16), (32, torch.uint32)) if nodes <= n), torch.int32)
    assert packed.dtype == wide and packed.shape == ((3, nodes) if nodes <= 32 else (3, nodes, math.ceil(nodes / 32)))
    assert torch.equal(mask.unpack(packed, nodes), cells)
    assert torch.equal(mask.unpack(mask.pack_words(cells), nodes), cells)
    if nodes <= 32:
        value = sum(int(bit) << place for place, bit in enumerate(cells[1, -1].tolist()))
        assert packed.long()[1, -1] == value, "bit c, least significant first, is column c"
    else:
        word = int(packed[1, -1, 1]) & 0xFFFFFFFF
        assert word == sum(int(bit) << place for place, bit in enumerate(cells[1, -1, 32:64].tolist()))
    lengths = torch.tensor([4, 0, 9])
    for mode in mask.MODES:
        flat = mask.layout(cells, lengths, mode)
        assert flat.numel() * flat.element_size() == mask.nbytes(mode, nodes, lengths.tolist())
    with pytest.raises(ValueError, match="1025"):
        mask.pack(torch.ones(1, 1025, dtype=torch.bool))


@FEW
@given(st.integers(1, 3), st.integers(1, 30), st.integers(0, 30), st.sampled_from(["ties", "floats", "rising"]), seeds)
def test_organize_keeps_the_best_and_their_parents(batch, count, keep, kind, seed):
    g = torch.Generator().manual_seed(seed)
    parent = random_parent(g, batch, count)
    parent[:, 1:] = torch.where(torch.rand(batch, count - 1, generator=g).to(DEVICE) < 0.3, -1, parent[:, 1:])
    score = torch.rand(batch, count, generator=g, dtype=torch.float64).to(DEVICE)
    score = (score * 3).floor() if kind == "ties" else score
    score[torch.rand(batch, count, generator=g).to(DEVICE) < 0.1] = torch.nan
    kept = tree.organize(score, parent, min(keep, count), count)
    for row in range(batch):
        best = []
        for node in range(count):
            own = float(score[row, node].nan_to_num(-math.inf))
            above = int(parent[row, node])
            best.append(min(own, best[above]) if above >= 0 else own)
        order = sorted(range(count), key=lambda i: (-best[i], i))[: min(keep, count)]
        assert kept[row].tolist() == sorted(order)
        assert all(int(parent[row, i]) in (-1, *order) for i in order)


# -- cache ---------------------------------------------------------------------------------------------------------------


@INTERPRETED
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.sampled_from([4, 24]), seeds)
def test_move(layers, rows, pairs, width, seed):
    """Any permutation within a row, in place, with no-ops among the pairs."""
    g = torch.Generator().manual_seed(seed)
    slots = 9
    buffer = torch.rand(layers, rows * slots, 3, width, generator=g).to(DEVICE)
    base = torch.arange(rows)[:, None] * slots
    source = torch.stack([torch.randperm(slots, generator=g)[:pairs] for _ in range(rows)]) + base
    target = torch.stack([torch.randperm(slots, generator=g)[:pairs] for _ in range(rows)]) + base
    expected = buffer.clone()
    for here, there in zip(source.flatten().tolist(), target.flatten().tolist()):
        expected[:, there] = buffer[:, here]
    for name in ("torch", "triton"):
        moved = buffer.clone()
        with on(name):
            cache.move(moved, source.to(DEVICE), target.to(DEVICE))
        assert torch.equal(moved, expected)


# -- sampling ------------------------------------------------------------------------------------------------------------


@INTERPRETED
@given(
    st.sampled_from([1, 2, 17, 1100]),
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.sampled_from([0, 1, 5, 60]),
    st.sampled_from([0.1, 0.55, 0.93, 1.0]),
    st.sampled_from([0.0, 0.07]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    seeds,
)
def test_warp(vocab, temperature, top_k, top_p, min_p, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 2, vocab, generator=g) * 3).to(dtype).to(DEVICE)
    logits[0, 0, : vocab // 2] = -torch.inf
    reference, law = both(lambda: sampling.warp(logits, temperature, top_k, top_p, min_p))
    # A sum that lands within rounding of an edge may fall on either side: float64 tells where.
    exact = sampling.warp(logits.double(), temperature, top_k, top_p, min_p)
    near = ((reference > 0) != (exact > 0)).any(-1) | ((law > 0) != (exact > 0)).any(-1)
    assert law.dtype == torch.float32
    assert near.sum() <= 1 and torch.allclose(law[~near], reference[~near], rtol=0, atol=1e-6)


def test_warp_of_ties_and_broken_rows():
    """Of ties at the edge of top-p the first go; at the k-th value all stay; a row that is no law is NaN in both."""
    logits = torch.tensor(
        [[1.0, 0, 0, 0, 0], [0] * 5, [math.nan, 0, 0, 0, 0], [math.inf, 0, 0, 0, 0], [-math.inf] * 5], device=DEVICE
    )
    for temperature, top_k, top_p in [(1.0, 0, 1e-17), (0, 0, 1.0), (1.0, 0, 0.3), (1.0, 0, 0.61), (1.0, 2, 0.61)]:
        reference, law = both(lambda t=temperature, k=top_k, p=top_p: sampling.warp(logits, t, k, p))
        assert torch.allclose(law, reference, rtol=0, atol=1e-6, equal_nan=True)
    assert law[2:].isnan().all() and not law[:2].isnan().any()


@INTERPRETED
@given(st.sampled_from([1, 3, 1100]), st.booleans(), seeds)
def test_renormalisation(vocab, ties, seed):
    g = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 4, (4, vocab), generator=g).float() if ties else torch.rand(4, vocab, generator=g) ** 4
    weights[:, 0] += 0.01 if not ties else 1
    probs = (weights / (1 if ties else weights.sum(1, keepdim=True))).to(DEVICE)
    k = torch.randint(0, vocab + 2, (4,), generator=g).to(DEVICE)
    p = torch.tensor([0.0, 0.311, 0.8013, 1.0], device=DEVICE)
    for how in (lambda: sampling.top_k_renorm(probs, k), lambda: sampling.top_p_renorm(probs, p)):
        reference, law = both(how)
        assert torch.allclose(law, reference, rtol=0, atol=1e-6)
        assert torch.allclose(law.sum(1), torch.ones(4, device=DEVICE))
    empty = torch.zeros(1, vocab, device=DEVICE)
    assert all(x.isnan().all() for x in both(lambda: sampling.top_p_renorm(empty, 0.5)))


def test_pick_at_the_edges():
    """u = 0, on a boundary, and just below 1; zeros on both ends; NaN and empty rows; weights that are not normalised."""
    weights = torch.tensor([[0, 1.0, 0, 3, 0], [2, 0, 0, 0, 2]], device=DEVICE)
    for u, wanted in ((0.0, [1, 0]), (0.25, [3, 0]), (0.5, [3, 4]), (1 - 2**-53, [3, 4])):
        uniform = torch.full((2,), u, dtype=torch.float64, device=DEVICE)
        assert all(x.tolist() == wanted for x in both(lambda at=uniform: sampling.pick(weights, at)))
    bad = torch.tensor([[0.0, 0], [math.nan, 1]], device=DEVICE)
    assert all(x.tolist() == [-1, -1] for x in both(lambda: sampling.pick(bad, torch.zeros(2, device=DEVICE))))


@INTERPRETED
@given(st.sampled_from([1, 5, 1100]), seeds)
def test_pick(vocab, seed):
    g = torch.Generator().manual_seed(seed)
    weights = (torch.rand(5, vocab, generator=g) ** 6).to(DEVICE)
    uniform = torch.rand(5, dtype=torch.float64, generator=g).to(DEVICE)
    reference, picked = both(lambda: sampling.pick(weights, uniform))
    assert torch.equal(reference, picked)


# -- verification --------------------------------------------------------------------------------------------------------


class Dense:
    """p [B, N, V] in the form that verifiers ask for."""

    def __init__(self, p):
        self.p = p

    def __call__(self, node):
        return self.p[torch.arange(len(node), device=node.device), node]

    def all(self):
        return self.p


def dyadic(generator, shape, cells=16):
    """Laws in 1/16ths: every sum of them is exact."""
    vocab = shape[-1]
    balls = torch.randint(0, vocab, (*shape[:-1], cells), generator=generator)
    return torch.nn.functional.one_hot(balls, vocab).sum(-2).float() / cells


def random_tree(generator, batch, nodes, vocab, law="point"):
    parent = random_parent(generator, batch, nodes)
    depth = tree.depths(parent)
    tokens = torch.randint(0, vocab, (batch, nodes), generator=generator).to(DEVICE)
    valid = (torch.rand(batch, nodes, generator=generator) > 0.1).to(DEVICE)
    q = None if law == "point" else dyadic(generator, (batch, nodes, vocab)).to(DEVICE)
    levels = int(torch.randint(0, nodes, (1,), generator=generator))
    return Tree(tokens, parent, depth, valid, depth.float(), law, "static", levels, q)


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("path", "length", "next_token"))


@settings(max_examples=200 if GPU else 24, deadline=None)
@given(
    st.sampled_from(["greedy", "target_only", "thresholds", "point", "iid", "without_replacement"]),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from([2, 3, 8]),
    seeds,
)
def test_tree_rules(rule, batch, nodes, vocab, seed):
    """p and q in 1/16ths and uniforms on the midpoints of 1/7919ths, so that no threshold is near any of them."""
    g = torch.Generator().manual_seed(seed)
    law = rule if rule in ("iid", "without_replacement") else "point"
    drafts = random_tree(g, batch, nodes, vocab, law)
    p = dyadic(g, (batch, nodes, vocab)).to(DEVICE)
    coins = ((torch.randint(0, 7919, (batch, nodes), generator=g) + 0.5) / 7919).double().to(DEVICE)
    rng = verify.Uniforms(coins, coins[:, 0].flip(0))
    if rule == "greedy":
        one_hot = torch.nn.functional.one_hot(p.argmax(-1), vocab).float()
        one_hot[0, -1] = torch.nan
        run = lambda: verify.greedy(drafts, Dense(one_hot), rng)  # noqa: E731
    elif rule in ("target_only", "thresholds"):
        single, acc = (0.4, 0.7) if rule == "thresholds" else (1.0, 1.0)
        run = lambda: verify.target_only(drafts, Dense(p), rng, single, acc)  # noqa: E731
    else:
        run = lambda: verify.rejection(drafts, Dense(p), rng)  # noqa: E731
    reference, verdict = both(run)
    assert same(reference, verdict)
    assert reference.path.shape == (batch, drafts.levels + 1)


@pytest.mark.parametrize("law", ["point", "iid", "without_replacement"])
@pytest.mark.parametrize("seed", range(6 if GPU else 1))
def test_tree_rules_on_a_wide_vocabulary(law, seed):
    """Several blocks of V, laws with no pattern; a coin within 1e-5 of a threshold does not occur with these seeds."""
    g = torch.Generator().manual_seed(seed)
    vocab, nodes = 1500, 9

    def laws():
        weights = torch.rand(2, nodes, vocab, generator=g) ** 8
        weights[..., :6] *= 200  # the drafted tokens
        return (weights / weights.sum(-1, keepdim=True)).to(DEVICE)

    drafts = replace(random_tree(g, 2, nodes, 6), levels=nodes - 1, law=law, q=None if law == "point" else laws())
    p, coins = laws(), torch.rand(2, nodes, dtype=torch.float64, generator=g).to(DEVICE)
    rng = verify.Uniforms(coins, coins[:, 0])
    for rule in (verify.rejection, verify.target_only):
        assert same(*both(lambda r=rule: r(drafts, Dense(p), rng)))


@settings(max_examples=100 if GPU else 12, deadline=None)
@given(st.integers(1, 3), st.integers(0, 5), st.sampled_from([2, 3, 8]), st.booleans(), seeds)
def test_chain(batch, steps, vocab, broken, seed):
    g = torch.Generator().manual_seed(seed)
    p, q = (dyadic(g, (batch, n, vocab)).to(DEVICE) for n in (steps + 1, steps))
    tokens = torch.randint(0, vocab, (batch, steps), generator=g).to(DEVICE)
    if broken and steps:
        odd = torch.tensor([0.0, math.nan, math.inf, 2.0, 1.0005, -1.0], device=DEVICE)
        at = torch.randint(0, len(odd), (batch, steps), generator=g).to(DEVICE)
        q.scatter_(2, tokens[..., None], odd[at][..., None])
    coins = ((torch.randint(0, 7919, (batch, steps), generator=g) + 0.5) / 7919).to(DEVICE)
    final = torch.rand(batch, generator=g).double().to(DEVICE)
    reference, verdict = both(lambda: verify.chain(tokens, q, p, coins, final))
    assert same(reference, verdict)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_coins_on_the_boundary(name):
    """Strictly below: a coin of 0 accepts any mass and none without, a coin on the threshold rejects."""
    zero = torch.zeros(1, 2, dtype=torch.long, device=DEVICE)
    parent = torch.tensor([[-1, 0]], device=DEVICE)
    drafts = Tree(zero, parent, parent + 1, parent > -2, parent.float(), "point", "static", 1)

    def accepted(rule, mass, coin):
        p = torch.tensor([mass, 1 - mass], device=DEVICE).expand(1, 2, 2)
        rng = verify.Uniforms(
            torch.full((1, 2), coin, dtype=torch.float64, device=DEVICE), torch.zeros(1, device=DEVICE)
        )
        return int(rule(drafts, Dense(p), rng).length) == 2

    with on(name):
        for rule in (verify.rejection, verify.target_only):
            assert accepted(rule, 0.25, 0.0) and accepted(rule, 0.25, 0.2499999999)
            assert not accepted(rule, 0.0, 0.0) and not accepted(rule, 0.25, 0.25)
            assert accepted(rule, 1.0, 1 - 2**-53) and not accepted(rule, 0.75, 1 - 2**-53)


@settings(max_examples=60 if GPU else 10, deadline=None)
@given(st.integers(1, 2), st.integers(1, 6), st.integers(0, 4), st.booleans(), st.sampled_from([0.0, 0.6, 1.0]), seeds)
def test_sglang_functions_follow_any_links(batch, nodes, steps, wild, acc, seed):
    """Repeated siblings, cycles, and links that point anywhere: bounded, and the same on both."""
    g = torch.Generator().manual_seed(seed)
    vocab = 4
    links = tree.links(random_parent(g, batch, nodes))
    if wild:
        links = tuple(torch.randint(-2, nodes + 2, (batch, nodes), generator=g).to(DEVICE) for _ in range(2))
    candidates = torch.randint(-1, vocab + 1, (batch, nodes), generator=g).to(DEVICE)
    here = (candidates, torch.arange(batch * nodes, device=DEVICE).view(batch, nodes), *links)
    predict = torch.randint(-1, vocab, (batch, nodes), generator=g).to(DEVICE)
    p = dyadic(g, (batch, nodes, vocab)).to(DEVICE).to([torch.float32, torch.float64][seed % 2])
    coins = ((torch.randint(0, 7919, (batch, nodes), generator=g) + 0.5) / 7919).to(DEVICE)
    for run in (
        lambda: sglang.verify_tree_greedy(*here, predict, steps),
        lambda: sglang.tree_speculative_sampling_target_only(*here, coins, coins[:, 0], p, steps, 1.0, acc),
    ):
        reference, made = both(run)
        assert all(torch.equal(reference[key], made[key]) for key in reference)


# -- the law of the float32 kernels, on midpoint grids --------------------------------------------------------------------

TOKENS, PARENT = [0, 0, 1, 2], [-1, 0, 0, 1]  # two children, of which the first has one


def grid_error(rule, p, cells, coin_slots, fine_coins, levels=2):
    """Largest deviation of the completed law of a block from p's own.

    With p in 1/cells every threshold is a multiple of 1/cells, or of 1/lcm(1 .. cells) where it is a share of what is left.
    One batch row a cell of the grid of midpoints then makes counts of rows exact probabilities, even in float32.
    """
    fine = math.lcm(*range(1, cells + 1))
    middle = lambda n: (torch.arange(n, dtype=torch.float64) + 0.5) / n  # noqa: E731
    axes = torch.cartesian_prod(*[middle(fine if fine_coins else cells)] * len(coin_slots), middle(fine))
    coins = torch.full((len(axes), len(TOKENS)), 0.5, dtype=torch.float64)
    coins[:, coin_slots] = axes[:, :-1]
    tokens, parent = (torch.tensor(x).expand(len(axes), -1).to(DEVICE) for x in (TOKENS, PARENT))
    drafts = Tree(tokens, parent, tree.depths(parent), parent > -2, parent.float(), "point", "static", levels)
    rng = verify.Uniforms(coins.to(DEVICE), axes[:, -1].to(DEVICE))
    verdict = rule(drafts, Dense(p.float().expand(len(axes), -1, -1).to(DEVICE)), rng)
    laws = {(): p[0], (0,): p[1], (1,): p[2], (0, 2): p[3]}
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64)

    def chance(sequence, known=0):
        return math.prod(float(laws.get(sequence[:i], uniform)[sequence[i]]) for i in range(known, len(sequence)))

    found = dict.fromkeys(product(range(3), repeat=levels + 1), 0.0)
    for path, length, token in zip(verdict.path.tolist(), verdict.length.tolist(), verdict.next_token.tolist()):
        block = (*[TOKENS[i] for i in path[1:length]], token)
        for rest in product(range(3), repeat=levels + 1 - length):
            found[block + rest] += chance(block + rest, length) / len(axes)
    return max(abs(found[s] - chance(s)) for s in found)


def laws_in(cells, seed):
    law = dyadic(torch.Generator().manual_seed(seed), (4, 3), cells)
    return (law * cells).round().double() / cells


@pytest.mark.parametrize("seed", range(2))
def test_float32_walks_have_the_exact_law(seed):
    assert grid_error(verify.target_only, laws_in(8, seed), 8, [0, 1], False) < 1e-12
    assert grid_error(verify.rejection, laws_in(4, seed), 4, [1, 2, 3], True) < 1e-12


@pytest.mark.parametrize("seed", range(4 if GPU else 1))
def test_triton_walks_have_the_exact_law(triton, seed):
    """The same; in the interpreter on coarse grids, and the second rule on the first level alone."""
    cells, levels, coins = (8, 2, [1, 2, 3]) if GPU else (3, 1, [1, 2])
    assert grid_error(verify.target_only, laws_in(cells, seed), cells, [0, 1], False) < 1e-12
    cells = 4 if GPU else 2
    assert grid_error(verify.rejection, laws_in(cells, seed), cells, coins, True, levels) < 1e-12


class SumNotReset(verify.TargetOnlyRule):
    def enter(self, node, moving):
        before = getattr(self, "sum", None)
        super().enter(node, moving)
        self.sum = self.sum if before is None else before


class TriedNotMasked(verify.TargetOnlyRule):
    def accept(self, child, token, trying, rng):
        before = self.residual
        ok = super().accept(child, token, trying, rng)
        self.residual = before
        return ok


@pytest.mark.parametrize("fault", [SumNotReset, TriedNotMasked])
def test_planted_faults_are_seen_on_the_grid(fault):
    rule = lambda drafts, p, rng: verify.walk(drafts, fault(p, 1.0, 1.0), rng)  # noqa: E731
    assert max(grid_error(rule, laws_in(8, seed), 8, [0, 1], False) for seed in range(2)) > 1 / 64


# -- the choice of a backend, and the loop -------------------------------------------------------------------------------


def test_triton_that_cannot_run_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="kernels=auto"):
        backend.use(name="triton")
    assert backend.chosen() == "auto" and not backend.on_triton(torch.zeros(1))
    monkeypatch.setattr(backend, "triton", None)
    with pytest.raises(UserError, match="pip install triton"):
        backend.use(name="triton")


def test_the_loop_gives_the_same_tokens_on_triton():
    """Sampled, batched, ragged, with penalties: structure, attention, warp, verification and commit, all on Triton."""
    target = tiny.load(dtype="float32", device=DEVICE)
    prompts = [target.chat([{"role": "user", "content": text}]) for text in ("abcabcabcabc the cat", "one two one two")]
    policy = StaticTree(widths=[2, 1], temperature=0.8, draw="without_replacement")
    how = {"drafter": SmallLM(target, layers=1), "policy": policy, "batch": 2, "budget": 20 if GPU else 4}
    sampler = Sampler(temperature=0.8, repetition_penalty=1.1)
    reference, turns = both(lambda: decode(target, prompts, sampler=sampler, **how))
    assert [t.output_ids for t in turns] == [t.output_ids for t in reference]
    assert [[s["path"] for s in t.steps] for t in turns] == [[s["path"] for s in t.steps] for t in reference]
    assert any(len(s["path"]) > 1 for t in turns for s in t.steps), "something must be accepted, and moved"


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton's compiler")
def test_all_kernels_compile_for_a_gpu():
    """The compiler refuses much that the interpreter lets pass. No GPU is needed."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "compile_kernels.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
