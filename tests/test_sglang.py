"""SGLang's functions against `oracles.py`: worked examples, trees grown by the real flow, malformed trees, coins on boundaries.

Probabilities are eighths and coins sixteenths wherever equality must be exact; float coins keep 1e-5 from any threshold.
"""

import math

import oracles
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from specresearch.kernels import sglang

QUICK = settings(max_examples=40, deadline=None, derandomize=True)
NAN, INF = math.nan, math.inf
ALMOST_ONE = 1 - 2.0**-24
MODES = ["full", "qlen_only", "qlen_only_bitpacking"]
INT32 = {"predicts", "accept_index", "accept_token_num"}
FLOAT = {"scores", "next_scores"}
LINKS = ["retrieve_index", "retrieve_next_token", "retrieve_next_sibling"]
seeds = st.integers(0, 10**6)


# -- comparing -------------------------------------------------------------------------------------------------------


def plain(x):
    """Tensors to nested lists, at any depth of tuples, lists and dictionaries."""
    if isinstance(x, Tensor):
        return x.tolist()
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return [plain(item) for item in x] if isinstance(x, list | tuple) else x


def call(name: str, *args, **kwargs):
    """The function's result, after a look at its arguments: they are never written to."""
    given_tensors = [t for x in [*args, *kwargs.values()] for t in (x if isinstance(x, list) else [x])]
    given_tensors = [t for t in given_tensors if isinstance(t, Tensor)]
    before = [t.clone() for t in given_tensors]
    result = getattr(sglang, name)(*args, **kwargs)
    for old, new in zip(before, given_tensors):
        assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    return result


def dtype_of(key: str, nodes: int, mode: str) -> torch.dtype:
    if key == "tree_mask" and mode == "qlen_only_bitpacking":
        return next(
            (t for most, t in [(8, torch.uint8), (16, torch.uint16), (32, torch.uint32)] if nodes <= most), torch.int32
        )
    if key == "tree_mask":
        return torch.bool
    return torch.int32 if key in INT32 else torch.float32 if key in FLOAT else torch.int64


def check(result: dict, wanted: dict, nodes: int = 0, mode: str = "full") -> None:
    wanted = {key: value for key, value in wanted.items() if key != "margin"}
    assert set(result) == set(wanted)
    for key, tensor in result.items():
        assert tensor.dtype == dtype_of(key, nodes, mode), key
        assert tensor.tolist() == wanted[key], key


def agree(name: str, *args, **kwargs):
    """Run both, compare dtypes, shapes and values; the result."""
    result = call(name, *args, **kwargs)
    wanted = getattr(oracles, name)(*plain(list(args)), **plain(kwargs))
    if isinstance(result, tuple):
        assert [t.dtype for t in result] == [torch.int64] * 3
        assert plain(result) == list(wanted)
    else:
        check(result, wanted, kwargs.get("num_draft_tokens", 0), kwargs.get("mask_mode", "full"))
    return result


def both(name: str, wanted, *args, **kwargs) -> None:
    """Oracle and implementation give what was worked out by hand."""
    made = agree(name, *args, **kwargs)
    assert plain(made) == (list(wanted) if isinstance(wanted, tuple) else wanted)


def ints(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def floats(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def flat_index(batch: int, nodes: int) -> Tensor:
    return torch.arange(batch * nodes).view(batch, nodes)


# -- worked examples: two children a node, three steps, seven nodes ----------------------------------------------------
#
#   slot 0 (token 9) - 1 (token 7) - 3 (token 1)
#                    |             - 4 (token 2)
#                    - 2 (token 3) - 5 (token 4) - 6 (token 6)

STEPS = [
    (floats([0.5, 0.25]), ints([7, 3])),
    (floats([0.5, 0.25], [1.0, 0.0]), ints([1, 2], [4, 5])),
    (floats([0.5, 0.5], [0.75, 0.25]), ints([8, 9], [6, 1])),
]
DRAFTED = [
    {
        "scores": [[[0.5, 0.25]]],
        "tokens": [[7, 3]],
        "parents": [[-1, 0, 1]],
        "input_ids": [[7, 3]],
        "next_scores": [[0.5, 0.25]],
    },
    {
        "scores": [[[0.25, 0.125], [0.25, 0.0]]],
        "tokens": [[1, 2, 4, 5]],
        "parents": [[2, 4]],
        "input_ids": [[1, 4]],
        "next_scores": [[0.25, 0.25]],
    },
    {
        "scores": [[[0.125, 0.125], [0.1875, 0.0625]]],
        "tokens": [[8, 9, 6, 1]],
        "parents": [[8, 6]],
        "input_ids": [[6, 8]],
        "next_scores": [[0.1875, 0.125]],
    },
]
CHILD, SIBLING = [1, 3, 5, -1, -1, 6, -1], [-1, 2, -1, 4, -1, -1, -1]
ROWS = ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1010011"]
CELLS = [[cell == "1" for cell in row] for row in ROWS]
TREE = {
    "positions": [3, 4, 4, 5, 5, 5, 6],
    "retrieve_index": [list(range(7))],
    "retrieve_next_token": [CHILD],
    "retrieve_next_sibling": [SIBLING],
}
TOKENS = [9, 7, 3, 1, 2, 4, 6]
MASKS = [
    [cell for row in CELLS for cell in [True] * 3 + row],
    [cell for row in CELLS for cell in row],
    [0b0000001, 0b0000011, 0b0000101, 0b0001011, 0b0010011, 0b0100101, 0b1100101],
]


@pytest.mark.parametrize("step", range(3))
def test_drafting_by_hand(step):
    carried = torch.tensor(DRAFTED[step - 1]["next_scores"]) if step else None
    both("select_top_k_tokens", DRAFTED[step], step, *STEPS[step], carried, 2)


def test_reranking_by_hand():
    """Three nodes tie for the last place: the first of them gets it."""
    lists = [[torch.tensor(made[key]) for made in DRAFTED] for key in ("scores", "tokens", "parents")]
    both("organize_draft_results", ([[-1, 0, 1, 2, 4]], [[0, 1, 2, 3, 4, 8]], [[7, 3, 1, 2, 4, 6]]), *lists, 7)


@pytest.mark.parametrize(("mode", "mask"), list(zip(MODES, MASKS)))
def test_building_by_hand(mode, mask):
    selected, drafts = ints([0, 1, 2, 3, 4, 8]), ints([7, 3, 1, 2, 4, 6])
    args = (ints(9)[:1], ints([-1, 0, 1, 2, 4]), selected, drafts, torch.tensor([3]))
    wanted = {"tree_mask": mask, **TREE, "draft_tokens": TOKENS}
    both("build_tree", wanted, *args, topk=2, depth=3, num_draft_tokens=7, mask_mode=mode)


def test_reconstructing_by_hand():
    args = {"batch": 1, "num_draft_tokens": 7}
    both("reconstruct_indices_from_tree_mask", TREE, torch.tensor(MASKS[1]), torch.tensor([3]), **args)


@pytest.mark.parametrize(
    ("steps", "accepted", "predicts"),
    [(3, [0, 2, 5, 6], [3, -1, 4, -1, -1, 6, 0]), (2, [0, 2, 5], [3, -1, 4, -1, -1, 6, -1]), (0, [0], [3] + [-1] * 6)],
)
def test_greedy_by_hand(steps, accepted, predicts):
    """The second sibling matches, then its child, then that one's; the rest is unwritten. Fewer steps stop earlier."""
    tree = [ints(TOKENS), ints(list(range(7))), ints(CHILD), ints(SIBLING)]
    wanted = {"predicts": predicts, "accept_index": [accepted], "accept_token_num": [steps]}
    both("verify_tree_greedy", wanted, *tree, ints([3, 0, 4, 0, 0, 6, 0]), steps)


def test_greedy_without_a_match_by_hand():
    tree = [ints(TOKENS), ints(list(range(7))), ints(CHILD), ints(SIBLING)]
    wanted = {"predicts": [5] + [-1] * 6, "accept_index": [[0, -1, -1, -1]], "accept_token_num": [0]}
    both("verify_tree_greedy", wanted, *tree, ints([5] * 7), 3)


def row_of(**probs: float) -> list[float]:
    """A law over ten tokens, of which t3=0.5 says that token 3 has one half."""
    return [probs.get(f"t{x}", 0.0) for x in range(10)]


SLOTS = [row_of(t7=0.5, t3=0.25, t0=0.25), row_of(t0=1.0), row_of(t4=0.25, t1=0.75), *[row_of(t0=1.0)] * 4]


@pytest.mark.parametrize(
    ("root", "second", "final", "predicts", "accepted"),
    [
        (
            0.625,
            0.25,
            0.5,
            {0: 3, 2: 1},
            [0, 2, -1, -1],
        ),  # between both siblings' masses; then on the boundary: rejected
        (0.5, 0.125, 0.0, {0: 3, 2: 4, 5: 0}, [0, 2, 5, -1]),  # 0.5 is no longer the first sibling's
        (0.0, 0.0, 0.0, {0: 7, 1: 0}, [0, 1, -1, -1]),
        (0.75, 0.0, ALMOST_ONE, {0: 0}, [0, -1, -1, -1]),  # all children rejected: what is left is token 0
    ],
)
def test_target_only_by_hand(root, second, final, predicts, accepted):
    tree = [ints(TOKENS), ints(list(range(7))), ints(CHILD), ints(SIBLING)]
    coins = floats([root, 0.0, second, 0.0, 0.0, 0.0, 0.0])
    wanted = {
        "predicts": [predicts.get(slot, -1) for slot in range(7)],
        "accept_index": [accepted],
        "accept_token_num": [len(predicts) - 1],
    }
    both("tree_speculative_sampling_target_only", wanted, *tree, coins, torch.tensor([final]), floats(SLOTS), 3)


def test_what_a_parent_rejected_is_no_fallback_of_its_child():
    """Token 7 was rejected at the root; the accepted child's row is all zero: the last of the vocabulary."""
    tree = [ints(TOKENS), ints(list(range(7))), ints(CHILD), ints(SIBLING)]
    laws = torch.zeros(1, 7, 10)
    laws[0, 0] = torch.tensor(SLOTS[0])
    args = (*tree, torch.full((1, 7), 0.625), torch.tensor([0.5]), laws, 3)
    assert agree("tree_speculative_sampling_target_only", *args)["predicts"].tolist() == [3, -1, 9, -1, -1, -1, -1]


def star(tokens: list[int], law: list[float], coin: float, final: float, steps: int = 1, **thresholds: float):
    """Root with `tokens` as its children; the arguments of the target-only sampler."""
    n, vocab = len(tokens) + 1, len(law)
    child = [1 if tokens else -1] + [-1] * len(tokens)
    sibling = [-1, *range(2, n), -1][:n]
    tree = [ints([0, *tokens]), ints(list(range(n))), ints(child), ints(sibling)]
    laws = torch.zeros(1, n, vocab)
    laws[0, 0], laws[0, 1:, 0] = torch.tensor(law), 1.0
    return [*tree, torch.full((1, n), coin), torch.tensor([final]), laws, steps], thresholds


@pytest.mark.parametrize(
    ("tokens", "law", "coin", "final", "thresholds", "first"),
    [
        ([2], [0, 1, 0], 0.0, 0.0, {"threshold_single": 0.0}, 1),  # no mass, no acceptance, whatever the thresholds
        ([2], [0, 1, 0], 0.0, 0.0, {"threshold_single": 0.0, "threshold_acc": 0.0}, 1),
        ([1, 2, 3], [0, 0.25, 0, 0.75], 0.25, 0.0, {}, 3),
        ([1], [0, 0.25, 0.75], 0.0, 0.0, {}, 1),
        ([1], [0, 1], ALMOST_ONE, 0.0, {}, 1),
        ([1, 2], [0, 0.25, 0.75], 0.5, 0.0, {"threshold_acc": 0.5}, 2),  # 0.25 / 0.5 is not above 0.5
        ([1, 2], [0, 0.25, 0.75], 0.375, 0.0, {"threshold_acc": 0.5}, 1),
        ([1, 2], [0, 0.25, 0.75], 0.875, 0.0, {"threshold_single": 0.25}, 1),
        ([1, 2], [0, 0.25, 0.75], ALMOST_ONE, 0.0, {"threshold_acc": 0.0}, 1),
        ([1, 1], [0.5, 0.25, 0.25], 0.375, 0.0, {}, 1),  # a duplicate's mass counts again
        ([1, 1], [0.5, 0.25, 0.25], 0.5, 0.75, {}, 2),
        ([3, 0], [0.5, 0, 0, 0.25], 0.875, 0.5, {}, 0),  # all that has mass is rejected: the last rejected
        ([0, 1], [0.5, 0, 0, 0], 0.875, 0.5, {}, 0),  # the last one rejected that has mass
        ([1, 2], [0, 0, 0, 0], 0.5, 0.5, {}, 3),  # nothing at all: the last of the vocabulary
        ([1], [0.5, 0.25, 0.25, 0], 0.875, 1.0, {}, 2),  # rounding finds none: the last that has mass
    ],
)
def test_target_only_boundaries_by_hand(tokens, law, coin, final, thresholds, first):
    args, thresholds = star(tokens, [float(p) for p in law], coin, final, **thresholds)
    assert agree("tree_speculative_sampling_target_only", *args, **thresholds)["predicts"][0] == first


@pytest.mark.parametrize(
    ("coins", "final", "predicts"),
    [
        ([0.5, 0.0], 0.0, [2, -1, -1]),  # 0.5 * 0.5 is not below 0.25
        ([0.25, 0.75], ALMOST_ONE, [1, 0, -1]),
        ([0.0, 0.25], 0.5, [1, 2, 1]),
        ([0.0, 0.25], ALMOST_ONE, [1, 2, 1]),
    ],
)
def test_chain_by_hand(coins, final, predicts):
    q = floats([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    p = floats([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])
    wanted = {"predicts": [predicts], "accept_token_num": [sum(x >= 0 for x in predicts) - 1]}
    both("chain_speculative_sampling", wanted, ints([1, 2]), q, p, floats(coins), torch.tensor([final]))


@pytest.mark.parametrize(
    ("q", "p", "coin", "accepted"),
    [
        (1.0, 1.0, ALMOST_ONE, True),
        (1 + 2.0**-23, 1.0, ALMOST_ONE, True),
        (1 + 5e-4, 1.0, ALMOST_ONE, True),
        (1.001, 1.0, 0.0, False),
        (2.0, 1.0, 0.0, False),
        (0.0, 1.0, 0.0, False),
        (-0.5, 1.0, 0.5, False),
        (NAN, 1.0, 0.0, False),
        (INF, 1.0, 0.0, False),
        (-INF, 1.0, 0.5, False),
        (0.5, 0.0, 0.0, False),  # a coin of 0 accepts nothing that has no mass
        (1 + 8e-6, 0.5, 0.99, False),
        (1 + 8e-6, 0.5, 0.5, False),
        (1 + 8e-6, 0.5, 0.4375, True),
    ],
)
def test_q_that_is_no_probability(q, p, coin, accepted):
    """Rejected for ever; and the residual holds nothing of the rejected draft, so all of it is token 2."""
    laws = floats([[0.0, p, 1 - p, 0.0], [1.0, 0.0, 0.0, 0.0]])
    args = (ints([1]), floats([[0.0, q, 0.0, 0.0]]), laws, floats([coin]), torch.tensor([0.5]))
    made = agree("chain_speculative_sampling", *args)
    assert made["accept_token_num"].tolist() == [int(accepted)]
    assert made["predicts"].tolist() == [[1, 0] if accepted else [2 if p < 1 else 3, -1]]


@pytest.mark.parametrize(
    ("k", "wanted"),
    [(1, [0.5, 0, 0, 0, 0.5]), (2, [0.5, 0, 0, 0, 0.5]), (3, [0.375, 0.125, 0.125, 0, 0.375]), (9, None)],
)
def test_top_k_by_hand(k, wanted):
    law = [0.375, 0.125, 0.125, 0.0, 0.375]
    for made in (call("top_k_renorm_prob", floats(law), k), torch.tensor(oracles.top_k_renorm_prob([law], k))):
        assert_close(made, floats(wanted or law))


@pytest.mark.parametrize(
    ("top_p", "wanted"),
    [
        (0.5, [1, 0, 0, 0]),
        (0.625, None),
        (0.51, None),
        (0.25, [1, 0, 0, 0]),
        (0.75, None),
        (1.0, None),
        (0.0, [1, 0, 0, 0]),
    ],
)
def test_top_p_by_hand(top_p, wanted):
    law = [0.5, 0.25, 0.25, 0.0]
    for made in (call("top_p_renorm_prob", floats(law), top_p), torch.tensor(oracles.top_p_renorm_prob([law], top_p))):
        assert_close(made, floats(wanted or law))


# -- trees grown by the real flow --------------------------------------------------------------------------------------


def laws(g: torch.Generator, shape: tuple[int, ...], vocab: int, kind: str) -> Tensor:
    """Probabilities [*shape, vocab]: eighths, so that all arithmetic is exact and ties abound; or any floats."""
    if kind == "floats":
        return (2 * torch.randn(*shape, vocab, generator=g)).softmax(-1)
    picks = torch.randint(0, vocab, (*shape, 8), generator=g)
    if kind == "certain":
        picks = picks[..., :1].expand(*shape, 8)
    return torch.nn.functional.one_hot(picks, vocab).float().mean(-2)


kinds = st.sampled_from(["eighths", "certain", "floats"])


def coins(g: torch.Generator, *shape: int) -> Tensor:
    """Sixteenths, 0 among them, and now and then the largest float32 below one."""
    made = torch.randint(0, 17, shape, generator=g)
    return torch.where(made == 16, ALMOST_ONE, made / 16)


def grow(g, batch: int, topk: int, steps: int, vocab: int, kind: str) -> list[list[Tensor]]:
    """Scores, tokens and parents of every step, each step compared with the oracle."""
    lists, carried = [[], [], []], None
    for step in range(steps):
        rows = batch * topk if step else batch
        probs, tokens = laws(g, (rows,), vocab, kind).topk(topk)
        made = agree("select_top_k_tokens", step, probs, tokens, carried, topk)
        carried = made["next_scores"]
        for lst, key in zip(lists, ("scores", "tokens", "parents")):
            lst.append(made[key])
    return lists


@st.composite
def shapes(draw):
    """batch, topk, steps, number of nodes, vocabulary: all sizes that can be grown, one node and one step among them."""
    batch, topk, steps = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    nodes = draw(st.integers(1, min(40, 1 + topk + (steps - 1) * topk * topk)))
    return batch, topk, steps, nodes, draw(st.integers(topk, 6))


@QUICK
@given(shapes(), kinds, st.sampled_from(MODES), seeds)
@example((1, 1, 1, 1, 1), "certain", "full", 0)
@example((2, 1, 4, 5, 2), "eighths", "full", 0)  # a chain
@example((2, 4, 1, 5, 4), "eighths", "qlen_only_bitpacking", 0)  # a star
@example((2, 4, 4, 9, 6), "floats", "qlen_only_bitpacking", 0)
@example((2, 4, 4, 17, 6), "floats", "qlen_only_bitpacking", 0)
@example((2, 4, 4, 32, 6), "floats", "qlen_only_bitpacking", 0)
@example((2, 4, 4, 33, 6), "floats", "qlen_only_bitpacking", 0)
def test_the_whole_flow(shape, kind, mode, seed):
    batch, topk, steps, nodes, vocab = shape
    g = torch.Generator().manual_seed(seed)
    lists = grow(g, batch, topk, steps, vocab, kind)
    parents, selected, drafts = agree("organize_draft_results", *lists, nodes)
    lengths, bonus = torch.randint(0, 6, (2, batch), generator=g)
    args = (bonus % vocab, parents, selected, drafts, lengths)
    tree = agree("build_tree", *args, topk=topk, depth=steps, num_draft_tokens=nodes, mask_mode=mode)
    cells = call("build_tree", *args, topk=topk, depth=steps, num_draft_tokens=nodes, mask_mode="qlen_only")[
        "tree_mask"
    ]
    again = agree("reconstruct_indices_from_tree_mask", cells, lengths, batch, num_draft_tokens=nodes)
    assert all(torch.equal(again[key], tree[key]) for key in ["positions", *LINKS]), (
        "the mask says all that the links say"
    )
    links = [tree["draft_tokens"].view(batch, nodes), *[tree[key] for key in LINKS]]
    most = int(torch.randint(0, steps + 2, (1,), generator=g))
    agree("verify_tree_greedy", *links, torch.randint(0, vocab, (batch, nodes), generator=g), most)
    sample(g, links, batch, nodes, vocab, kind, most)


def sample(g, links, batch, nodes, vocab, kind, most, **thresholds) -> None:
    flips, final = coins(g, batch, nodes), coins(g, batch)
    if kind == "floats":
        flips, final = torch.rand(batch, nodes, generator=g), torch.rand(batch, generator=g)
    args = [*links, flips, final, laws(g, (batch, nodes), vocab, kind), most]
    wanted = oracles.tree_speculative_sampling_target_only(*plain(args), **thresholds)
    if kind != "floats" or wanted["margin"] > 1e-5:
        check(call("tree_speculative_sampling_target_only", *args, **thresholds), wanted)


@QUICK
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), seeds)
def test_reranking_keeps_parents(batch, topk, steps, seed):
    """Any scores, ties and NaN among them, children above their parents too: no node goes without its parent."""
    g = torch.Generator().manual_seed(seed)
    menu = torch.tensor([0.0, 0.25, 0.5, 1.0, NAN])
    lists = [[], [], []]
    for step in range(steps):
        width = topk if step else 1
        lists[0].append(menu[torch.randint(0, 5, (batch, width, topk), generator=g)])
        lists[1].append(torch.randint(0, 9, (batch, width * topk), generator=g))
        first = topk + topk * topk * (step - 1)
        chosen = torch.rand(batch, topk * topk, generator=g).argsort(-1)[:, :topk] + first
        lists[2].append(chosen if step else torch.arange(-1, topk).expand(batch, -1))
    total = topk + (steps - 1) * topk * topk
    for nodes in {1, (total + 1) // 2, total, total + 1}:
        parents, selected, _ = agree("organize_draft_results", *lists, nodes)
        for row, above in zip(selected.tolist(), parents.tolist()):
            assert row == sorted(set(row))
            assert all(flat < topk or above[flat // topk] in row for flat in row)


# -- malformed trees ---------------------------------------------------------------------------------------------------


def built(parents, selected, depth, topk=1, **kwargs):
    n = len(selected) + 1
    args = (ints(5), ints(parents), ints(selected), ints([0] * (n - 1)), ints(0))
    return agree("build_tree", *args, topk=topk, depth=depth, num_draft_tokens=n, mask_mode="qlen_only", **kwargs)


@pytest.mark.parametrize(
    ("parents", "selected", "child", "sibling", "positions", "rows"),
    [
        # node 1's parent is itself: three hops are all it gets, and its child's walk goes there too
        ([-1, 1, 1], [0, 1, 2], [1, -1, 2, -1], [-1, -1, 3, -1], [0, 1, 3, 3], ["1000", "1100", "1010", "1011"]),
        # nodes 1 and 2 are each other's parents
        ([-1, 2, 1], [0, 1, 2], [1, -1, 3, 2], [-1, -1, -1, -1], [0, 1, 3, 3], ["1000", "1100", "1011", "1011"]),
        # node 2's parent was not selected: it stays where it is, unlinked, and so its child's walk ends there
        ([-1, 7, 1], [0, 1, 2], [1, -1, 3, -1], [-1, -1, -1, -1], [0, 1, 1, 2], ["1000", "1100", "1010", "1011"]),
        # no parents anywhere: -1 is none, also where a slot holds -1
        ([-1, -1, -1], [-1, 1, 2], [-1, -1, -1, -1], [-1, -1, -1, -1], [0, 1, 1, 1], ["1000", "1100", "1010", "1001"]),
        # flat index beyond the list of parents
        ([-1, 0, 1], [0, 1, 9], [1, 2, -1, -1], [-1, -1, -1, -1], [0, 1, 2, 1], ["1000", "1100", "1110", "1001"]),
        # twice the same node: children belong to the first
        ([-1, 0, 1], [0, 0, 1], [1, 3, -1, -1], [-1, 2, -1, -1], [0, 1, 1, 2], ["1000", "1100", "1010", "1101"]),
    ],
)
def test_malformed_trees_by_hand(parents, selected, child, sibling, positions, rows):
    made = built(parents, selected, depth=3)
    assert made["retrieve_next_token"].tolist() == [child]
    assert made["retrieve_next_sibling"].tolist() == [sibling]
    assert made["positions"].tolist() == positions
    assert made["tree_mask"].int().view(4, 4).tolist() == [[int(cell) for cell in row] for row in rows]


@QUICK
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 7), st.sampled_from(MODES), seeds)
def test_malformed_trees(batch, topk, depth, nodes, mode, seed):
    """Any flat indices and parents: absent, cyclic, far out of range, negative, duplicate."""
    g = torch.Generator().manual_seed(seed)
    width = topk * (depth - 1) + 1 if depth > 1 else 0
    total = topk + (depth - 1) * topk * topk
    far = torch.tensor([-(2**40), -2, -1, total, total + 1, 2**40])
    selected = torch.randint(-1, total + 1, (batch, nodes - 1), generator=g)
    parents = torch.randint(-1, total + 1, (batch, width), generator=g)
    for x in (selected, parents):
        x[torch.rand(x.shape, generator=g) < 0.1] = far[seed % 6]
    lengths = torch.randint(0, 4, (batch,), generator=g)
    drafts = torch.randint(0, 9, (batch, nodes - 1), generator=g)
    args = (lengths + 1, parents, selected, drafts, lengths)
    agree("build_tree", *args, topk=topk, depth=depth, num_draft_tokens=nodes, mask_mode=mode)


def random_links(g, batch: int, nodes: int, wild: bool) -> list[Tensor]:
    """Tokens below 3 and any links: cycles, the root as a child, -1, out of range."""
    far = torch.tensor([-(2**40), -2, nodes, nodes + 1, 2**40])
    links = torch.randint(-1, nodes, (2, batch, nodes), generator=g)
    if wild:
        out = torch.rand(links.shape, generator=g) < 0.15
        links = torch.where(out, far[torch.randint(0, 5, links.shape, generator=g)], links)
    return [torch.randint(0, 3, (batch, nodes), generator=g), flat_index(batch, nodes), *links]


@QUICK
@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 7), st.booleans(), seeds)
def test_malformed_links(batch, nodes, steps, wild, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(4):
        links = random_links(g, batch, nodes, wild)
        agree("verify_tree_greedy", *links, torch.randint(0, 3, (batch, nodes), generator=g), steps)
        sample(g, links, batch, nodes, 4, "eighths", steps)


def test_cycles_by_hand():
    """A node that is its own sibling is tried n times in all; a child that is the root starts the walk anew."""
    here = [ints([0, 1, 2]), flat_index(1, 3), ints([1, -1, -1]), ints([-1, 1, -1])]
    both(
        "verify_tree_greedy",
        {"predicts": [2, -1, -1], "accept_index": [[0, -1, -1]], "accept_token_num": [0]},
        *[*here, ints([2, 2, 2]), 2],
    )
    law = torch.tensor([0.125, 0.125, 0.75]).expand(1, 3, 3)
    for coin, accepted in [(0.3125, 1), (0.375, 0), (0.5, 0)]:  # 0.125 counts three times, so 0.375 is the bound
        args = (*here, torch.full((1, 3), coin), torch.tensor([0.0]), law, 2)
        assert agree("tree_speculative_sampling_target_only", *args)["accept_token_num"].tolist() == [accepted]
    back = [ints([1, 1, 2]), flat_index(1, 3), ints([1, 0, -1]), ints([-1, -1, -1])]
    both(
        "verify_tree_greedy",
        {"predicts": [1, 1, -1], "accept_index": [[0, 1, 0, 1, 0]], "accept_token_num": [4]},
        *[*back, ints([1, 1, 1]), 4],
    )


@pytest.mark.parametrize("token", [-1, 4, 2**40])
def test_tokens_outside_the_vocabulary(token):
    """They have no mass anywhere, least of all the neighbour row's."""
    p = torch.full((2, 3, 4), 0.25)
    tree = [ints([0, token, 1], [0, token, token]), flat_index(2, 3), ints([1, -1, -1], [1, -1, -1])]
    links = [*tree, ints([-1, 2, -1], [-1, 2, -1])]
    agree("tree_speculative_sampling_target_only", *links, torch.zeros(2, 3), torch.tensor([0.5, 0.75]), p, 2)
    agree("chain_speculative_sampling", ints([1, token], [token, 1]), p[:, :2], p, torch.zeros(2, 2), torch.zeros(2))


@QUICK
@given(st.integers(1, 3), st.integers(1, 9), st.booleans(), seeds)
def test_any_mask(batch, nodes, tree_like, seed):
    """Masks of random trees, and cells at random."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, nodes, nodes, generator=g) < 0.4
    for b in range(batch if tree_like else 0):
        mask[b] = torch.eye(nodes, dtype=torch.bool)
        for i in range(1, nodes):
            mask[b, i] |= mask[b, int(torch.randint(0, i, (1,), generator=g))]
    lengths = torch.randint(0, 5, (batch,), generator=g)
    agree("reconstruct_indices_from_tree_mask", mask.flatten(), lengths, batch, num_draft_tokens=nodes)


# -- samplers ----------------------------------------------------------------------------------------------------------


@QUICK
@given(shapes(), st.sampled_from([0.0, 1e-12, 0.25, 0.5, 1.0]), st.sampled_from([0.0, 0.25, 0.5, 1.0]), seeds)
def test_thresholds(shape, acc, single, seed):
    batch, _, steps, nodes, vocab = shape
    g = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(0, i, (1,), generator=g)) for i in range(1, nodes)]
    tokens = torch.randint(0, vocab, (batch, nodes), generator=g)  # siblings may be duplicates
    child, sibling = [-1] * nodes, [-1] * nodes
    for i in range(nodes - 1, 0, -1):
        child[parents[i - 1]], sibling[i] = i, child[parents[i - 1]]
    links = [tokens, flat_index(batch, nodes), *[ints(*[x] * batch) for x in (child, sibling)]]
    for kind in ("eighths", "floats"):
        sample(g, links, batch, nodes, vocab, kind, steps, threshold_acc=acc, threshold_single=single)


@QUICK
@given(st.integers(1, 3), st.integers(0, 4), st.integers(1, 6), st.booleans(), st.booleans(), seeds)
def test_chain_sampling(batch, steps, vocab, exact, broken, seed):
    g = torch.Generator().manual_seed(seed)
    kind = "eighths" if exact else "floats"
    q, p = laws(g, (batch, steps), vocab, kind), laws(g, (batch, steps + 1), vocab, kind)
    drafts = torch.randint(0, vocab, (batch, steps), generator=g)
    same = torch.rand(batch, steps, generator=g) < 0.3
    q = torch.where(same[..., None], p[:, :steps], q)  # then the residual is all zero
    if broken:
        odd = torch.tensor([NAN, INF, 2.0, 0.0, 1 + 5e-4, 1.001])[torch.randint(0, 6, q.shape, generator=g)]
        q = torch.where(torch.rand(q.shape, generator=g) < 0.3, odd, q)
    flips, final = coins(g, batch, steps), coins(g, batch)
    if not exact:
        flips, final = torch.rand(batch, steps, generator=g), torch.rand(batch, generator=g)
    args = (drafts, q, p, flips, final)
    wanted = oracles.chain_speculative_sampling(*plain(list(args)))
    assume(exact or wanted["margin"] > 1e-5)
    check(call("chain_speculative_sampling", *args), wanted)


def check_law(made: Tensor, wanted: list[list[float]]) -> None:
    assert made.dtype == torch.float32
    assert_close(made, torch.tensor(wanted), rtol=1e-6, atol=1e-6)
    assert torch.equal(made > 0, torch.tensor(wanted) > 0)


@QUICK
@given(st.integers(1, 4), st.integers(1, 9), kinds, st.booleans(), seeds)
def test_top_k(rows, vocab, kind, scalar, seed):
    g = torch.Generator().manual_seed(seed)
    probs = laws(g, (rows,), vocab, kind)
    k = torch.randint(1, vocab + 3, (rows,), generator=g)
    k = int(k[0]) if scalar else k
    check_law(call("top_k_renorm_prob", probs, k), oracles.top_k_renorm_prob(*plain([probs, k])))


@QUICK
@given(st.integers(1, 4), st.integers(1, 9), kinds, st.booleans(), seeds)
def test_top_p(rows, vocab, kind, scalar, seed):
    g = torch.Generator().manual_seed(seed)
    probs = laws(g, (rows,), vocab, kind)
    top_p = torch.rand(rows, generator=g) if kind == "floats" else torch.randint(1, 17, (rows,), generator=g) / 16
    mass = probs.double().sort(-1, descending=True).values.cumsum(-1)
    assume(kind != "floats" or (mass - (top_p[0] if scalar else top_p[:, None])).abs().min() > 1e-5)
    top_p = float(top_p[0]) if scalar else top_p
    check_law(call("top_p_renorm_prob", probs, top_p), oracles.top_p_renorm_prob(*plain([probs, top_p])))


# -- batches, strides, sizes -------------------------------------------------------------------------------------------


def examples(g) -> dict[str, tuple[list, dict]]:
    """Each function that takes a batch with arguments for three requests, malformed ones among them."""
    batch, nodes, vocab, steps = 3, 6, 4, 3
    lengths = torch.randint(0, 5, (batch,), generator=g)
    drafts = torch.randint(0, vocab, (batch, nodes - 1), generator=g)
    selected = torch.randint(-1, 12, (batch, nodes - 1), generator=g)
    parents = torch.randint(-1, 12, (batch, 5), generator=g)
    links = random_links(g, batch, nodes, wild=True)
    p, q = laws(g, (batch, nodes), vocab, "eighths"), laws(g, (batch, nodes - 1), vocab, "eighths")
    flips, final = coins(g, batch, nodes), coins(g, batch)
    shape = {"topk": 2, "depth": 3, "num_draft_tokens": nodes}
    return {
        "build_tree": ([lengths % vocab, parents, selected, drafts, lengths], {**shape, "mask_mode": "qlen_only"}),
        "verify_tree_greedy": ([*links, drafts[:, :1].expand(batch, nodes).clone()], {"num_steps": steps}),
        "tree_speculative_sampling_target_only": ([*links, flips, final, p], {"num_steps": steps}),
        "chain_speculative_sampling": ([drafts, q, p, flips[:, 1:].clone(), final], {}),
        "top_k_renorm_prob": ([p[:, 0].clone(), torch.tensor([1, 2, 3])], {}),
        "top_p_renorm_prob": ([p[:, 0].clone(), torch.tensor([0.25, 0.5, 0.75])], {}),
    }


NAMES = list(examples(torch.Generator()))


def named(made, size: int) -> dict[str, Tensor]:
    """Every output with the batch in front, global slots made local."""
    made = made if isinstance(made, dict) else {"law": made}
    return {key: value.reshape(size, -1) for key, value in made.items()}


def local(key: str, value: Tensor, row: int, nodes: int) -> Tensor:
    return torch.where(value >= 0, value - row * nodes, value) if key in ("retrieve_index", "accept_index") else value


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_influence_each_other(name):
    for seed in range(10):
        args, kwargs = examples(torch.Generator().manual_seed(seed))[name]
        together = named(call(name, *args, **kwargs), 3)
        for row in range(3):
            own = [x[row : row + 1] for x in args]
            if "verify" in name or "target_only" in name:
                own[1] = flat_index(1, 6)
            for key, value in named(call(name, *own, **kwargs), 1).items():
                assert torch.equal(value[0], local(key, together[key][row], row, 6)), key


@pytest.mark.parametrize("name", NAMES)
def test_any_strides(name):
    """Arguments that lie otherwise in memory give the same."""
    args, kwargs = examples(torch.Generator().manual_seed(3))[name]
    apart = [torch.stack([x, x.flip(0)], -1)[..., 0] for x in args]
    assert not any(x.is_contiguous() for x in apart)
    wanted = named(call(name, *args, **kwargs), 3)
    for key, value in named(call(name, *apart, **kwargs), 3).items():
        assert torch.equal(value, wanted[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_nobody_asks(name):
    """A batch of no requests is answered by no rows."""
    args, kwargs = examples(torch.Generator().manual_seed(0))[name]
    for key, value in named(call(name, *args, **kwargs), 3).items():
        made = call(name, *[x[:0] for x in args], **kwargs)
        made = made if isinstance(made, Tensor) else made[key]
        assert made.numel() == 0 and made.dtype == value.dtype, key


def test_sixty_four_nodes_eight_requests():
    g = torch.Generator().manual_seed(0)
    batch, topk, steps, nodes, vocab = 8, 8, 6, 64, 16
    parents, selected, drafts = agree("organize_draft_results", *grow(g, batch, topk, steps, vocab, "eighths"), nodes)
    lengths = torch.randint(0, 40, (batch,), generator=g)
    args = (drafts[:, 0], parents, selected, drafts, lengths)
    for mode in MODES:
        tree = agree("build_tree", *args, topk=topk, depth=steps, num_draft_tokens=nodes, mask_mode=mode)
    links = [tree["draft_tokens"].view(batch, nodes), *[tree[key] for key in LINKS]]
    agree("verify_tree_greedy", *links, torch.randint(0, vocab, (batch, nodes), generator=g), steps)
    for kind in ("eighths", "floats"):
        sample(g, links, batch, nodes, vocab, kind, steps)


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_a_thousand_nodes(shape):
    """As deep and as wide as it gets: all of the chain is accepted, and only the star's last child matches."""
    n = 1024
    mask = torch.ones(n, n, dtype=torch.bool).tril() if shape == "chain" else torch.eye(n, dtype=torch.bool)
    mask[:, 0] = True
    made = agree("reconstruct_indices_from_tree_mask", mask.flatten(), torch.tensor([7]), 1, num_draft_tokens=n)
    tokens = torch.arange(n)[None]
    target = (tokens + 1) % n if shape == "chain" else torch.full_like(tokens, n - 1)
    steps = n - 1 if shape == "chain" else 1
    verdict = agree("verify_tree_greedy", tokens, *[made[key] for key in LINKS], target, steps)
    assert verdict["accept_token_num"].tolist() == [steps]
    assert verdict["accept_index"][0, -1] == n - 1


def test_a_thousand_nodes_built():
    """A chain of 1024 nodes in 32 words a row."""
    n = 1024
    parents = torch.arange(-1, n - 2)[None]
    args = (ints(5), parents, torch.arange(n - 1)[None], torch.arange(n - 1)[None], torch.tensor([2]))
    agree("build_tree", *args, topk=1, depth=n - 1, num_draft_tokens=n, mask_mode="qlen_only_bitpacking")


# -- arguments that do not fit -----------------------------------------------------------------------------------------


def good() -> dict[str, dict]:
    """Two requests each."""
    links = {"candidates": torch.zeros(2, 4).long(), **{key: torch.zeros(2, 4).long() - 1 for key in LINKS}}
    links["retrieve_index"] = flat_index(2, 4)
    sampled = {
        **links,
        "uniform_samples": torch.zeros(2, 4),
        "uniform_samples_for_final_sampling": torch.zeros(2),
        "target_probs": torch.full((2, 4, 5), 0.2),
        "num_steps": 2,
    }
    half = torch.full((2, 2), 0.5)
    zeros = torch.zeros(2, 4).long()
    return {
        "select_top_k_tokens": {
            "step": 1,
            "topk_p": half.repeat(2, 1),
            "topk_index": zeros.view(4, 2),
            "scores": half,
            "topk": 2,
        },
        "organize_draft_results": {
            "score_list": [half[:, None], half[:, None].repeat(1, 2, 1)],
            "token_list": [zeros[:, :2], zeros],
            "parents_list": [ints([-1, 0, 1], [-1, 0, 1]), ints([2, 3], [2, 3])],
            "num_draft_token": 4,
        },
        "build_tree": {
            "bonus_tokens": torch.zeros(2).long(),
            "parent_list": ints([-1, 0, 1], [-1, 0, 1]),
            "top_scores_index": ints([0, 1, 2], [0, 1, 2]),
            "draft_tokens": zeros[:, :3],
            "seq_lens": torch.ones(2).long(),
            "topk": 2,
            "depth": 2,
            "num_draft_tokens": 4,
            "mask_mode": "full",
        },
        "reconstruct_indices_from_tree_mask": {
            "tree_mask": torch.ones(32).bool(),
            "seq_lens": torch.ones(2).long(),
            "batch": 2,
            "num_draft_tokens": 4,
        },
        "verify_tree_greedy": {**links, "target_predict": zeros, "num_steps": 2},
        "tree_speculative_sampling_target_only": sampled,
        "chain_speculative_sampling": {
            "draft_tokens": zeros[:, :3],
            "draft_probs": torch.full((2, 3, 5), 0.2),
            "target_probs": torch.full((2, 4, 5), 0.2),
            "uniform_samples": torch.zeros(2, 3),
            "uniform_samples_for_final_sampling": torch.zeros(2),
        },
        "top_k_renorm_prob": {"probs": half, "top_k": torch.tensor([1, 2])},
        "top_p_renorm_prob": {"probs": half, "top_p": torch.tensor([0.5, 0.9])},
    }


SPOILED = {
    "one rank more": lambda x: x[None],
    "one rank less": lambda x: x[0],
    "another row": lambda x: torch.cat([x, x[:1]]),
    "wider": lambda x: torch.cat([x, x[..., :1]], -1),
    "another type": lambda x: x.long() if x.is_floating_point() else x.float(),
}
# Whoever grows alone errs, and so does everything it was to fit: there the message may name either.
REFERENCES = {
    "bonus_tokens",
    "candidates",
    "draft_tokens",
    "probs",
    "score_list",
    "scores",
    "target_probs",
    "token_list",
    "topk_p",
}
# Another vocabulary is no mistake where nothing else has one, and a scalar is as good as a value for each row.
FREE = {("probs", "wider"), ("target_probs", "wider"), ("top_k", "one rank less"), ("top_p", "one rank less")}


def misfits():
    """(function, argument, how it is spoiled): every tensor argument in every way that leaves it unfit."""
    for name, arguments in good().items():
        for argument, value in arguments.items():
            for how in SPOILED if isinstance(value, Tensor | list) else ():
                if (argument, how) not in FREE or name == "chain_speculative_sampling":
                    yield pytest.param(name, argument, how, id=f"{name}-{argument}-{how}")


def spoil(argument: str, value, how: str):
    """Of a list, the last step; but nobody reads the parents of the last step."""
    if isinstance(value, Tensor):
        return SPOILED[how](value)
    first, last = value
    return [SPOILED[how](first), last] if argument == "parents_list" else [first, SPOILED[how](last)]


def some_name(name: str, argument: str, free: bool) -> str:
    """A pattern for the message: the argument's own name, or any argument's."""
    return r"\b(" + "|".join(good()[name] if free else [argument]) + r")\b"


def test_the_good_arguments_are_good():
    for name, arguments in good().items():
        call(name, **arguments)


@pytest.mark.parametrize(("name", "argument", "how"), list(misfits()))
def test_misfits_are_named(name, argument, how):
    arguments = good()[name]
    arguments[argument] = spoil(argument, arguments[argument], how)
    free = argument in REFERENCES and how in ("another row", "wider")
    with pytest.raises(ValueError, match=some_name(name, argument, free)):
        getattr(sglang, name)(**arguments)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("build_tree", "mask_mode", "triangular"),
        ("build_tree", "num_draft_tokens", 5),
        ("build_tree", "num_draft_tokens", 0),
        ("build_tree", "topk", 0),
        ("build_tree", "depth", 0),
        ("build_tree", "parent_list", ints([-1, 0], [-1, 0])),
        ("select_top_k_tokens", "topk", 3),
        ("select_top_k_tokens", "scores", None),
        ("select_top_k_tokens", "step", -1),
        ("organize_draft_results", "num_draft_token", 8),
        ("organize_draft_results", "num_draft_token", 0),
        ("organize_draft_results", "score_list", []),
        ("reconstruct_indices_from_tree_mask", "num_draft_tokens", 3),
        ("reconstruct_indices_from_tree_mask", "batch", 3),
        ("verify_tree_greedy", "num_steps", -1),
        ("tree_speculative_sampling_target_only", "num_steps", -1),
        ("chain_speculative_sampling", "draft_probs", torch.full((2, 3, 4), 0.25)),
    ],
)
def test_values_that_do_not_fit(name, argument, value):
    """Two arguments contradict each other: the message names one of them."""
    with pytest.raises(ValueError, match=some_name(name, argument, free=True)):
        getattr(sglang, name)(**{**good()[name], argument: value})
