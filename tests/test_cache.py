"""The slot cache and the tree arithmetic, against plain forwards without a cache and against loops in Python."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specresearch.kernels.cache import move
from specresearch.kernels.tree import ancestors, links, node_paths
from specresearch.models import hf
from specresearch.models.cache import SlotCache
from specresearch.models.hf import HFModel
from specresearch.models.tiny import byte_tokenizer
from specresearch.rng import CounterRng
from specresearch.types import Step, Tree, UserError, Verdict

VOCAB, CAPACITY, LAYERS = 257, 40, 3
EXACT = 1e-10
QUICK = settings(max_examples=150, deadline=None, derandomize=True)
SLOW = settings(max_examples=30, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def grouped() -> HFModel:
    """A random Llama of three layers with grouped K/V heads, in float64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return HFModel(LlamaForCausalLM(config).double(), byte_tokenizer(), "grouped")


@torch.no_grad()
def plain(model: HFModel, tokens: list[int]) -> Tensor:
    """Logits [T, V] of the bare transformers model, without cache, mask or positions of ours."""
    return model.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def walk_up(parent: list[int], node: int) -> list[int]:
    """Nodes from the root down to `node`, both included."""
    path = [node]
    while parent[path[0]] >= 0:
        path.insert(0, parent[path[0]])
    return path


def parents(size: int):
    return st.tuples(st.just(-1), *(st.integers(0, i - 1) for i in range(1, size))).map(list)


def tree_of(tokens: list[list[int]], parent: list[list[int]], valid: list[list[bool]] | None = None) -> Tree:
    depth = [[len(walk_up(p, i)) - 1 for i in range(len(p))] for p in parent]
    token = torch.tensor(tokens)
    mask = torch.ones_like(token).bool() if valid is None else torch.tensor(valid)
    levels = max(map(max, depth))
    return Tree(token, torch.tensor(parent), torch.tensor(depth), mask, mask.float(), "point", "static", levels)


# -- rounds of prefill, tree pass and commit -------------------------------------------------------------------------


@dataclass
class Rows:
    """What the cache ought to hold, kept as lists of tokens beside the adapter that is tested."""

    model: HFModel
    cached: list[list[int]]
    root: list[int]
    live: list[bool]

    def fill(self, rows: list[int], prompts: list[list[int]]) -> None:
        tokens = torch.zeros(len(rows), max(map(len, prompts)), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = torch.tensor(prompt)
        logits, features = self.model.extend(rows, tokens, torch.tensor([len(p) for p in prompts]), ())
        assert features is None
        for i, (row, prompt) in enumerate(zip(rows, prompts)):
            assert (logits[i] - plain(self.model, prompt)[-1]).abs().max() < EXACT
            self.cached[row], self.live[row], self.root[row] = list(prompt), True, prompt[0]

    def step(self) -> Step:
        length = torch.tensor([len(tokens) for tokens in self.cached])
        extent = max(len(tokens) for tokens, live in zip(self.cached, self.live) if live)
        rows = torch.arange(len(length))
        history = torch.zeros(len(length), CAPACITY + 20, dtype=torch.long)
        rng = CounterRng(rows, rows)
        live = torch.tensor(self.live)
        return Step(torch.tensor(self.root), rows, length, live, torch.full_like(rows, 99), history, rng, extent)

    def round(self, parent: list[list[int]], tokens: list[list[int]], goal: list[int]) -> None:
        """One pass over a tree per row, all nodes checked; then the path to each row's goal is committed."""
        tokens = [[root, *rest[1:]] for root, rest in zip(self.root, tokens)]
        step, tree = self.step(), tree_of(tokens, parent)
        logits = self.model.forward(step, tree, ()).logits
        paths = [[walk_up(p, node) for node in range(len(p))] for p in parent]
        for row, cached in enumerate(self.cached):
            for node, path in enumerate(paths[row]):
                if self.live[row]:
                    wanted = plain(self.model, cached + [tokens[row][i] for i in path])[-1]
                    assert (logits[row, node] - wanted).abs().max() < EXACT
        path = torch.full((len(parent), tree.levels + 1), -1)
        for row, node in enumerate(goal):
            if self.live[row]:
                path[row, : len(paths[row][node])] = torch.tensor(paths[row][node])
                self.cached[row] += [tokens[row][i] for i in paths[row][node]]
                self.root[row] = (self.root[row] * 31 + node + 7) % VOCAB
        self.model.commit(step, Verdict(path, (path >= 0).sum(1), torch.tensor(self.root)))


def start(model: HFModel, batch: int, tree_size: int) -> Rows:
    model.cache = None
    model.reserve(batch, CAPACITY, tree_size)
    return Rows(model, [[0]] * batch, [0] * batch, [False] * batch)


token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


def play(model: HFModel, data: st.DataObject, batch: int) -> None:
    size = data.draw(st.integers(1, 7))
    rows = start(model, batch, size)
    if data.draw(st.booleans()):
        rows.fill(list(range(batch)), [data.draw(token_lists) for _ in range(batch)])
    else:  # at different times, in any order
        for row in data.draw(st.permutations(range(batch))):
            rows.fill([row], [data.draw(token_lists)])
    for _ in range(data.draw(st.integers(2, 4))):
        each = range(batch)
        rows.round(
            [data.draw(parents(size)) for _ in each],
            [data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size)) for _ in each],
            [data.draw(st.integers(0, size - 1)) for _ in each],
        )
        for row in each:
            event = data.draw(st.sampled_from(["go on", "go on", "end", "refill"]))
            if event == "refill" or len(rows.cached[row]) > CAPACITY - 12:
                rows.fill([row], [data.draw(token_lists)])
            elif event == "end" and sum(rows.live) > 1:
                rows.live[row] = False


@SLOW
@given(st.data(), st.integers(1, 3))
def test_every_node_and_every_commit_equal_plain_forwards(grouped, data, batch):
    """Ragged rows, several rounds on random trees; rows end and are filled again while others go on."""
    play(grouped, data, batch)


def test_a_dead_row_may_be_longer_than_the_live_ones(grouped):
    """`extent` speaks of live rows only; the leftovers of a finished row must neither be seen nor do harm."""
    rows = start(grouped, 2, 5)
    rows.fill([0, 1], [list(range(CAPACITY)), [5, 6]])
    rows.live[0] = False
    chain = [[-1, 0, 1, 2, 3]] * 2
    rows.round(chain, [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], [0, 4])
    rows.round(chain, [[1, 2, 3, 4, 5], [3, 3, 3, 3, 3]], [0, 2])
    rows.fill([0], [[7, 7, 7]])
    rows.round(chain, [[1, 2, 3, 4, 5], [1, 2, 1, 2, 1]], [3, 3])


def test_pads_are_invisible(grouped):
    """Nodes that are not valid hang on the root and change no other node."""
    rows = start(grouped, 1, 8)
    rows.fill([0], [[1, 2, 3, 4]])
    step = rows.step()
    short = grouped.forward(step, tree_of([[5, 6, 7]], [[-1, 0, 0]]), ()).logits
    for pad in (0, 200):
        parent, token = [-1, 0, 0, 0, 0, 0, 0, 0], [5, 6, 7] + [pad] * 5
        long = grouped.forward(step, tree_of([token], [parent], [[True] * 3 + [False] * 5]), ()).logits
        assert (long[:, :3] - short).abs().max() < EXACT


@pytest.mark.parametrize("accepted", range(1, 7))
def test_a_path_is_kept_in_its_order(grouped, accepted):
    """The second branch of a comb: source and target slots overlap, and every step moves further left."""
    parent = [-1, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    rows = start(grouped, 1, len(parent))
    rows.fill([0], [[1, 2, 3]])
    rows.round([parent], [list(range(50, 61))], [2 * (accepted - 1)])
    assert rows.cached[0] == [1, 2, 3, 1, *range(52, 52 + 2 * (accepted - 1), 2)]
    rows.round([parent], [list(range(70, 81))], [0])


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 13])
def test_prefill_in_chunks_equals_in_one_go(grouped, monkeypatch, chunk):
    prompts = [list(range(13)), [9, 8, 7], [4], list(range(20, 28))]
    tokens = torch.zeros(4, 13, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.tensor(prompt)
    length = torch.tensor([len(p) for p in prompts])
    rows = start(grouped, 5, 4)
    at = [4, 0, 3, 1]
    whole, features = grouped.extend(at, tokens, length, (1, "norm"))
    monkeypatch.setattr(hf, "PREFILL_CHUNK", chunk)
    grouped.cache = None
    grouped.reserve(5, CAPACITY, 4)
    logits, pieces = grouped.extend(at, tokens, length, (1, "norm"))
    assert (logits - whole).abs().max() < EXACT
    assert features.shape == pieces.shape == (4, 13, 32)
    for i, count in enumerate(length.tolist()):
        assert (features[i, :count] - pieces[i, :count]).abs().max() < EXACT
    for row, prompt in zip(at, prompts):
        rows.cached[row], rows.live[row] = list(prompt), True
    rows.round([[-1, 0, 0, 1]] * 5, [[1, 2, 3, 4]] * 5, [3] * 5)
    rows.round([[-1, 0, 0, 1]] * 5, [[1, 2, 3, 4]] * 5, [2] * 5)


def test_a_filled_row_leaves_its_neighbours_alone(grouped):
    rows = start(grouped, 3, 4)
    rows.fill([1], [[1, 2, 3]])
    for other in (0, 2):
        rows.fill([other], [list(range(CAPACITY))])
    rows.live = [False, True, False]
    rows.round([[-1, 0, 1, 2]] * 3, [[1, 2, 3, 4]] * 3, [3] * 3)
    rows.round([[-1, 0, 1, 2]] * 3, [[1, 2, 3, 4]] * 3, [3] * 3)


def test_reserve_keeps_a_cache_that_is_large_enough(grouped):
    grouped.cache = None
    grouped.reserve(2, 20, 8)
    first = grouped.cache
    grouped.reserve(2, 21, 7)
    assert grouped.cache is first
    grouped.reserve(2, 21, 8)
    assert grouped.cache is not first and grouped.cache.slots == 29
    grouped.reserve(1, 21, 8)
    assert grouped.cache.batch == 1


def test_more_slots_than_reserved_are_refused(grouped):
    rows = start(grouped, 1, 3)
    rows.fill([0], [list(range(CAPACITY))])
    with pytest.raises(UserError, match=rf"^{CAPACITY + 4} cache slots are needed and {CAPACITY + 3} were reserved"):
        rows.round([[-1, 0, 1, 2]], [[1, 2, 3, 4]], [0])


# -- features --------------------------------------------------------------------------------------------------------

TAPS = [(0,), (1,), (LAYERS,), ("norm",), (2, 0, "norm", LAYERS, 1)]


@torch.no_grad()
def streams(model: HFModel, tokens: list[int]) -> dict[int | str, Tensor]:
    """The residual stream at every tap [T, F], by transformers' own means and one hook of the test's."""
    before_norm = []
    hook = model.model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
    output = model.model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    hook.remove()
    hidden = [state[0] for state in output.hidden_states]
    assert len(hidden) == LAYERS + 1
    return {**dict(enumerate(hidden[:-1])), LAYERS: before_norm[0], "norm": hidden[-1]}


def test_streams_are_what_they_are_called(grouped):
    """The reference itself: embeddings at 0, head(norm stream) = logits, norm(last stream) = norm stream."""
    tokens = [3, 1, 4, 1, 5]
    own, bare = streams(grouped, tokens), grouped.model
    assert torch.equal(own[0], bare.get_input_embeddings()(torch.tensor(tokens)))
    assert torch.equal(bare.model.norm(own[LAYERS]), own["norm"])
    assert (bare.lm_head(own["norm"]) - plain(grouped, tokens)).abs().max() < EXACT
    assert not torch.allclose(own[LAYERS], own["norm"])


@pytest.mark.parametrize("taps", TAPS)
def test_features_of_a_prompt(grouped, taps):
    start(grouped, 2, 4)
    prompts = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 0, 0, 0]])
    logits, features = grouped.extend([0, 1], prompts, torch.tensor([5, 2]), taps)
    for row, count in enumerate([5, 2]):
        own = streams(grouped, prompts[row, :count].tolist())
        wanted = torch.cat([own[tap] for tap in taps], -1)
        assert (features[row, :count] - wanted).abs().max() < EXACT
        assert (logits[row] - plain(grouped, prompts[row, :count].tolist())[-1]).abs().max() < EXACT


@pytest.mark.parametrize("taps", TAPS)
def test_features_of_a_tree(grouped, taps):
    rows = start(grouped, 2, 6)
    rows.fill([0, 1], [[3, 1, 4, 1, 5], [2, 7]])
    parent = [[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 0, 4]]
    tokens = [[rows.root[0], 11, 12, 13, 14, 15], [rows.root[1], 21, 22, 23, 24, 25]]
    output = grouped.forward(rows.step(), tree_of(tokens, parent), taps)
    for row in range(2):
        for node in range(6):
            path = [tokens[row][i] for i in walk_up(parent[row], node)]
            own = streams(grouped, rows.cached[row] + path)
            wanted = torch.cat([own[tap][-1] for tap in taps], -1)
            assert (output.features[row, node] - wanted).abs().max() < EXACT


def test_no_features_unless_asked_for(grouped):
    rows = start(grouped, 1, 2)
    rows.fill([0], [[3, 1]])
    tree = tree_of([[1, 2]], [[-1, 0]])
    assert grouped.forward(rows.step(), tree, (1,)).features is not None
    assert grouped.forward(rows.step(), tree, ()).features is None


# -- moving ----------------------------------------------------------------------------------------------------------


@QUICK
@given(st.data(), st.integers(1, 3), st.integers(1, 12))
def test_move_against_a_loop(data, layers, slots):
    """Targets are distinct, sources are not; they overlap, so that a loop without a copy would read what it wrote."""
    targets = data.draw(st.lists(st.integers(0, slots - 1), unique=True, min_size=1))
    sources = data.draw(st.lists(st.integers(0, slots - 1), min_size=len(targets), max_size=len(targets)))
    buffer = torch.randn(layers, slots, 2, 3)
    wanted, before = buffer.clone(), buffer.clone()
    for source, target in zip(sources, targets):
        for layer in range(layers):
            wanted[layer, target] = before[layer, source]
    whole = buffer
    move(buffer, torch.tensor(sources), torch.tensor(targets))
    assert buffer is whole and torch.equal(buffer, wanted)


def test_move_takes_tables_and_keeps_what_stays():
    buffer = torch.arange(8.0).view(1, 8, 1, 1)
    move(buffer, torch.tensor([[1, 2], [5, 7]]), torch.tensor([[0, 1], [5, 6]]))
    assert buffer.flatten().tolist() == [1, 2, 2, 3, 4, 5, 7, 7]


def test_a_cache_write_lands_in_its_slots(grouped):
    """K and V come back apart, as they went in, for the rows that were asked for."""
    cache = SlotCache(grouped.shapes, 3, 5)
    key, value = torch.randn(2, 2, 2, 4, dtype=torch.float64), torch.randn(2, 2, 2, 4, dtype=torch.float64)
    cache.aim(torch.tensor([10, 11, 1, 2]), [2, 0], 4)
    keys, values = cache.write(1, key, value)
    assert keys.shape == values.shape == (2, 2, 4, 4)
    assert torch.equal(keys[0, :, :2], key[0]) and torch.equal(values[0, :, :2], value[0])
    assert torch.equal(keys[1, :, 1:3], key[1]) and torch.equal(values[1, :, 1:3], value[1])
    assert not keys[0, :, 2:].any() and not keys[1, :, 0].any()
    (buffers,) = cache.buffers.values()
    assert not any(buffer[layer].any() for buffer in buffers for layer in (0, 2)), "the other layers are untouched"


# -- tree arithmetic -------------------------------------------------------------------------------------------------

SHAPES = {
    "root alone": [-1],
    "pair": [-1, 0],
    "chain": [-1, *range(69)],
    "star": [-1] + [0] * 40,
    "binary": [-1] + [(i - 1) // 2 for i in range(1, 31)],
    "comb": [-1] + [i - 1 - (i % 2 == 0) for i in range(1, 40)],
}


def check_arithmetic(parent: list[list[int]], valid: list[list[bool]], spare: int = 0) -> None:
    """`ancestors`, `links` and `node_paths` against their definitions."""
    size = len(parent[0])
    tokens = [[1000 * row + node for node in range(size)] for row in range(len(parent))]
    levels = max(len(walk_up(p, i)) - 1 for p in parent for i in range(size)) + spare
    reach = ancestors(torch.tensor(parent)).tolist()
    child, sibling = (x.tolist() for x in links(torch.tensor(parent), torch.tensor(valid)))
    paths = node_paths(torch.tensor(parent), torch.tensor(tokens), levels)
    assert paths.shape == (len(parent), size, levels)
    for row, (up, ok) in enumerate(zip(parent, valid)):
        for node in range(size):
            path = walk_up(up, node)
            assert reach[row][node] == [other in path for other in range(size)]
            own = [tokens[row][i] for i in path[1:]]
            assert paths[row, node].tolist() == own + [-1] * (levels - len(own))
            children = [c for c in range(size) if up[c] == node and ok[c]]
            assert child[row][node] == (children[0] if children else -1)
            later = [c for c in range(node + 1, size) if node and ok[node] and up[c] == up[node] and ok[c]]
            assert sibling[row][node] == (later[0] if later else -1)


@QUICK
@given(st.data(), st.integers(1, 14), st.integers(1, 3), st.integers(0, 2))
def test_tree_arithmetic_on_random_trees(data, size, batch, spare):
    parent = [data.draw(parents(size)) for _ in range(batch)]
    valid = [[True, *data.draw(st.lists(st.booleans(), min_size=size - 1, max_size=size - 1))] for _ in range(batch)]
    check_arithmetic(parent, valid, spare)


@pytest.mark.parametrize("name", SHAPES)
def test_tree_arithmetic_on_named_shapes(name):
    parent = SHAPES[name]
    every = [True] * len(parent)
    other = [i % 3 != 1 for i in range(len(parent))]
    check_arithmetic([parent, parent], [every, other])


def test_children_are_met_in_order_by_following_the_links():
    """First child, then next siblings: each valid node exactly once, in the order of its number."""
    parent, valid = [-1, 0, 0, 1, 0, 1, 2, 2], [True, True, False, True, True, True, True, True]
    child, sibling = (x[0].tolist() for x in links(torch.tensor([parent]), torch.tensor([valid])))
    met = {}
    for node in range(8):
        at, met[node] = child[node], []
        for _ in range(9):  # links that go round in a circle must not hang the test
            if at >= 0:
                met[node].append(at)
                at = sibling[at]
    assert met == {0: [1, 4], 1: [3, 5], 2: [6, 7], 3: [], 4: [], 5: [], 6: [], 7: []}
