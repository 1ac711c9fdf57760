"""Laws against transformers' own processors and warpers; uniforms and draws against arithmetic and simple statistics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specresearch.kernels.sampling import largest, pick, warp
from specresearch.rng import ACCEPT, DRAFT, RESIDUAL, CounterRng, mix, row_key
from specresearch.sampling import Sampler
from specresearch.types import Frontier, Step, Tree, UserError

VOCABS = [1, 2, 3, 7, 33, 257, 1000]
QUICK = settings(max_examples=150, deadline=None, derandomize=True)


# -- warp ------------------------------------------------------------------------------------------------------------


def random_logits(kind: str, rows: int, vocab: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=g, dtype=torch.float64)
    made = {"plain": 3 * x, "ties": (2 * x).round(), "peaked": 60 * x, "flat": 0 * x, "close": 1e-7 * x}[kind]
    return made.to(dtype)


def with_holes(logits: Tensor, seed: int) -> Tensor:
    """Some entries -inf, at least one of a row left."""
    holes = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    holes.scatter_(-1, logits.argmin(-1, keepdim=True), False)
    return logits.masked_fill(holes, -torch.inf)


def hf_warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    """The order of transformers' `_get_logits_processor`, which `test_order_is_the_one_of_generate` ties it to."""
    made = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        made.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        made.append(TopPLogitsWarper(top_p))
    if min_p:
        made.append(MinPLogitsWarper(min_p))
    return made


settings_of_a_warp = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.3, 5.0]),
        "top_k": st.sampled_from([0, 1, 2, 3, 10, 50, 5000]),
        "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.8, 0.95, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.05, 0.3, 0.9, 1.0]),
    }
)
kinds = st.sampled_from(["plain", "ties", "peaked", "flat", "close"])
dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(0, 10**6)


@QUICK
@given(settings_of_a_warp, kinds, dtypes, st.sampled_from(VOCABS), st.booleans(), seeds)
def test_warp_equals_transformers(how, kind, dtype, vocab, holes, seed):
    logits = random_logits(kind, 5, vocab, seed, dtype)
    logits = with_holes(logits, seed) if holes else logits
    ids = torch.zeros(5, 1, dtype=torch.long)
    law = warp(logits, **how)
    assert law.dtype == dtype
    assert torch.equal(law, hf_warpers(**how)(ids, logits.clone()).softmax(-1))
    assert torch.equal(warp(logits.view(5, 1, vocab), **how)[:, 0], law), "the shape in front does not matter"


@pytest.mark.parametrize("seed", range(20))
def test_order_is_the_one_of_generate(target, seed):
    """The list that `generate` itself would make, from a GenerationConfig with everything on."""
    how = {"temperature": 0.6, "top_k": 40, "top_p": 0.8, "min_p": 0.1}
    config = GenerationConfig(do_sample=True, repetition_penalty=1.4, sequence_bias={(3,): 1.5, (9,): -2.0}, **how)
    made = target.model._get_logits_processor(generation_config=config, input_ids_seq_length=6, device="cpu")
    history = torch.randint(0, 257, (4, 6), generator=torch.Generator().manual_seed(seed))
    logits = random_logits("plain", 4, 257, seed, torch.float32)
    sampler = Sampler(**how, repetition_penalty=1.4, logit_bias={3: 1.5, 9: -2.0})
    ours = sampler.warp(sampler.process(logits[:, None], history, torch.full((4,), 6)))[:, 0]
    assert len(made) == 6
    assert torch.equal(ours, made(history, logits.clone()).softmax(-1))


@QUICK
@given(kinds, dtypes, st.sampled_from(VOCABS), st.booleans(), seeds)
def test_temperature_zero_is_one_hot_at_the_first_argmax(kind, dtype, vocab, holes, seed):
    logits = random_logits(kind, 5, vocab, seed, dtype)
    logits = with_holes(logits, seed) if holes else logits
    law = warp(logits, 0.0, top_k=2, top_p=0.3, min_p=0.2)
    for row, p in zip(logits.tolist(), law.tolist()):
        assert p == [float(i == row.index(max(row))) for i in range(vocab)]


@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.9}])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rows_that_are_no_law_become_nan(temperature, how):
    logits = torch.randn(7, 11)
    logits[0, 4] = torch.nan
    logits[1, 4] = torch.inf
    logits[2] = -torch.inf
    logits[3, 2:5] = torch.inf
    logits[4] = torch.nan
    law = warp(logits, temperature, **how)
    assert law[:5].isnan().all()
    assert torch.allclose(law[5:].sum(-1), torch.ones(2)), "the rows beside them are none the worse"
    assert pick(law, torch.full((7,), 0.5)).lt(0).tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_half_precision_is_raised(dtype, temperature):
    logits = random_logits("plain", 3, 257, 0).to(dtype)
    law = warp(logits, temperature, top_p=0.9)
    assert law.dtype == torch.float32
    assert torch.equal(law, warp(logits.float(), temperature, top_p=0.9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_processors_work_in_full_precision_as_in_generate(dtype):
    """`generate` raises the logits first; a penalty rounded to half precision makes ties that are none."""
    logits = random_logits("plain", 4, 257, 1).to(dtype)
    history = torch.arange(257).expand(4, -1)
    sampler = Sampler(repetition_penalty=1.3, logit_bias={7: 0.01})
    ours = sampler.process(logits[:, None], history, torch.full((4,), 257))[:, 0]
    theirs = hf_processors(1.3, {7: 0.01})(history, logits.float())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": math.nan},
        {"top_k": -1},
        {"top_k": 0.9},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.nan},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {3: -math.inf}},
        {"logit_bias": {"a": 1.0}},
    ],
)
def test_bad_settings_are_refused_in_one_line(bad):
    (name,) = bad
    with pytest.raises(UserError, match=f"^{name}=.*: use ") as caught:
        Sampler(**bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", [-1, 257, 10**6])
def test_bias_outside_the_vocabulary_is_refused(token):
    with pytest.raises(UserError, match=r"^logit_bias .*257"):
        Sampler(logit_bias={token: 1.0}).process(torch.zeros(1, 1, 257), torch.zeros(1, 1).long(), torch.ones(1).long())


# -- processors ------------------------------------------------------------------------------------------------------


def hf_processors(penalty: float, bias: dict[int, float]) -> LogitsProcessorList:
    made = LogitsProcessorList()
    if bias:
        made.append(SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}))
    if penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(penalty))
    return made


penalties = st.sampled_from([0.7, 1.0, 1.1, 2.5])


def biases(vocab: int):
    value = st.integers(-160, 160).map(lambda n: n / 8) | st.just(-1e4)  # transformers keeps them in float32
    return st.dictionaries(st.integers(0, vocab - 1), value, max_size=vocab - 1)


def process(penalty: float, bias: dict[int, float], history: list[int], logits: Tensor) -> Tensor:
    """One law [V] by transformers' processors."""
    return hf_processors(penalty, bias)(torch.tensor([history]), logits[None].clone())[0]


@QUICK
@given(penalties, biases(13), kinds, dtypes, st.lists(st.integers(1, 9), min_size=1, max_size=3), seeds)
def test_process_equals_transformers_on_histories(penalty, bias, kind, dtype, known, seed):
    """Only the first `known` tokens of each row count; what stands behind them is another turn's."""
    logits = random_logits(kind, len(known) * 2, 13, seed, dtype).view(len(known), 2, 13)
    tokens = torch.randint(0, 13, (len(known), 9), generator=torch.Generator().manual_seed(seed))
    ours = Sampler(repetition_penalty=penalty, logit_bias=bias).process(logits, tokens, torch.tensor(known))
    for row, count in enumerate(known):
        for width in range(2):
            wanted = process(penalty, bias, tokens[row, :count].tolist(), logits[row, width])
            assert torch.equal(ours[row, width], wanted)


@st.composite
def random_trees(draw, vocab: int, batch: int):
    """Parents, tokens, depths of one random tree per row, all of one size."""
    size = draw(st.integers(1, 9))
    parents = [[-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)] for _ in range(batch)]
    tokens = [[draw(st.integers(0, vocab - 1)) for _ in range(size)] for _ in range(batch)]
    return parents, tokens


def walk_up(parent: list[int], node: int) -> list[int]:
    """Nodes from the root down to `node`, both included."""
    path = [node]
    while parent[path[0]] >= 0:
        path.insert(0, parent[path[0]])
    return path


def make_step(history: Tensor, length: list[int], rng: CounterRng | None = None) -> Step:
    """A step whose row b has cached the first length[b] tokens of its history."""
    rows = torch.arange(len(length))
    n = torch.tensor(length)
    root = history[rows, n]
    rng = rng or CounterRng(rows, rows)
    return Step(root, rows, n, torch.ones_like(rows).bool(), torch.full_like(rows, 99), history, rng, max(length))


@QUICK
@given(penalties, biases(13), random_trees(13, 2), st.lists(st.integers(0, 7), min_size=2, max_size=2), seeds)
def test_each_node_is_processed_on_its_own_path(penalty, bias, shape, length, seed):
    parents, tokens = shape
    history = torch.randint(0, 13, (2, 9), generator=torch.Generator().manual_seed(seed))
    step = make_step(history, length)
    depth = [[len(walk_up(p, i)) - 1 for i in range(len(p))] for p in parents]
    parent, token = torch.tensor(parents), torch.tensor(tokens)
    token[:, 0] = step.root
    valid = torch.ones_like(token, dtype=torch.bool)
    levels = max(map(max, depth))
    tree = Tree(token, parent, torch.tensor(depth), valid, valid.float(), "point", "static", levels)
    size = token.shape[1]
    logits = random_logits("plain", 2 * size, 13, seed).view(2, size, 13)
    sampler = Sampler(temperature=0.8, top_k=9, repetition_penalty=penalty, logit_bias=bias)
    probs = sampler.probs(logits, step, tree)
    for row in range(2):
        for node in range(size):
            own = history[row, : length[row]].tolist() + [int(token[row, i]) for i in walk_up(parents[row], node)]
            wanted = hf_warpers(0.8, 9, 1.0, 0.0)(None, process(penalty, bias, own, logits[row, node])[None]).softmax(
                -1
            )
            at = torch.tensor([node, node])
            assert torch.equal(probs(at)[row], wanted[0])
            assert torch.equal(probs.all()[row, node], wanted[0])


def make_frontier(step: Step, path: Tensor) -> Frontier:
    blank = torch.zeros(path.shape[:2], dtype=torch.long)
    return Frontier(step, blank, blank, torch.ones(*path.shape[:2], 1, dtype=torch.bool), path, blank, 0)


def test_draft_scores_see_processors_but_no_warp():
    """A growth score is the log-softmax behind the processors alone; q is their warp; a silent row proposes nothing."""
    history = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
    step = make_step(history, [2, 1])
    path = torch.tensor([[[7, -1], [7, 8]], [[9, -1], [-1, -1]]])
    logits = random_logits("plain", 4, 13, 0).view(2, 2, 13)
    logits[1, 1] = -torch.inf
    sampler = Sampler(temperature=0.5, top_k=4, repetition_penalty=1.7, logit_bias={2: 3.0})
    score, q = sampler.draft(logits, make_frontier(step, path), 0.9)
    assert score.dtype == torch.float32
    known = [[1, 2, 3], [4, 5]]
    for row, width in [(0, 0), (0, 1), (1, 0)]:
        own = known[row] + [t for t in path[row, width].tolist() if t >= 0]
        plain = process(1.7, {2: 3.0}, own, logits[row, width])
        assert torch.equal(score[row, width], plain.float().log_softmax(-1))
        assert torch.equal(q[row, width], hf_warpers(0.9, 4, 1.0, 0.0)(None, plain[None]).softmax(-1)[0])
    assert (score[1, 1] == -torch.inf).all() and (q[1, 1] == 0).all()
    assert sampler.draft(logits, make_frontier(step, path), None)[1] is None


# -- uniforms --------------------------------------------------------------------------------------------------------

MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """The published function on Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=20))
def test_mix_is_splitmix64(values):
    assert [x & MASK for x in mix(torch.tensor(values)).tolist()] == [splitmix(x & MASK) for x in values]
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the first output of the published generator for seed 0


def table(keys: int = 64, rounds: int = 16, slots: int = 16) -> np.ndarray:
    """Uniforms [stream, key, round, slot] as a run would see them: hashed keys, small rounds, small slots."""
    key = torch.tensor([row_key(0, i, 0) for i in range(keys)])
    out = np.empty((3, keys, rounds, slots))
    for r in range(rounds):
        rng = CounterRng(key, torch.full_like(key, r))
        for s in range(slots):
            for i, stream in enumerate((DRAFT, ACCEPT, RESIDUAL)):
                out[i, :, r, s] = rng.uniform(stream, s).numpy()
    return out


@pytest.fixture(scope="module")
def uniforms() -> np.ndarray:
    return table()


def test_uniforms_are_uniform(uniforms):
    n = uniforms.size
    assert uniforms.min() >= 0 and uniforms.max() < 1
    assert len(np.unique(uniforms)) == n, "no uniform is used twice"
    assert abs(uniforms.mean() - 0.5) < 5 / math.sqrt(12 * n)
    assert abs(uniforms.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    counts = np.histogram(uniforms, 64, (0, 1))[0]
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * math.sqrt(2 * 63)
    low = (uniforms * 2**53).astype(np.int64) & 63  # the last bits are as even as the first
    assert ((np.bincount(low.ravel(), minlength=64) - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("axis", ["stream", "key", "round", "slot"])
def test_uniforms_are_independent_along(uniforms, axis):
    """Neighbours along each axis, and their squares, are uncorrelated; each slice has the mean of a uniform."""
    u = np.moveaxis(uniforms, ["stream", "key", "round", "slot"].index(axis), 0)
    for step in range(1, min(4, len(u))):
        a, b = u[:-step].ravel(), u[step:].ravel()
        for f in (lambda x: x, np.square, lambda x: (x * 64) % 1):
            assert abs(np.corrcoef(f(a), f(b))[0, 1]) < 5 / math.sqrt(a.size)
    means = u.reshape(len(u), -1).mean(1)
    assert np.abs(means - 0.5).max() < 5 / math.sqrt(12 * u[0].size)


def test_largest_and_smallest_uniform(monkeypatch):
    rng = CounterRng(torch.zeros(2).long(), torch.zeros(2).long())
    monkeypatch.setattr("specresearch.rng.mix", lambda x: torch.tensor([0, -1]))
    assert rng.uniform(ACCEPT, 0).tolist() == [0.0, 1 - 2.0**-53]


def test_a_coin_is_fixed_within_a_step_and_never_accepts_nan():
    key = torch.arange(1000)
    rng = CounterRng(key, key)
    half = torch.full((1000,), 0.5)
    first = rng.accept(3, half)
    assert torch.equal(first, rng.accept(torch.full((1000,), 3), half)) and not torch.equal(first, rng.accept(4, half))
    assert not rng.accept(3, torch.zeros(1000)).any() and rng.accept(3, torch.ones(1000)).all()
    assert not rng.accept(3, half * torch.nan).any()


def test_picks_and_draws_are_fresh_and_the_same_in_every_batch():
    """Two picks of a step differ, so do the columns of a draw and its slots; a row alone gets what it gets in a batch."""
    key, even = torch.tensor([row_key(7, i, 1) for i in range(400)]), torch.ones(400, 3, 50)
    rng = CounterRng(key, key * 0 + 5)
    picks = [rng.pick(even[:, 0]) for _ in range(3)]
    draws = [rng.draw(even, slot) for slot in range(2)]
    columns = [*picks, *draws[0].T, *draws[1].T]
    for i, a in enumerate(columns):
        for b in columns[:i]:
            assert (a == b).double().mean() < 0.1  # 1/50 by chance
    alone = CounterRng(key[9:10], torch.tensor([5]))
    assert [int(alone.pick(even[:1, 0])) for _ in range(3)] == [int(p[9]) for p in picks]
    assert alone.draw(even[:1], 1)[0].tolist() == draws[1][9].tolist()


def test_row_keys_differ():
    keys = {row_key(s, i, t) for s in range(3) for i in [*range(20), "a", "b", "a/1"] for t in range(4)}
    assert len(keys) == 3 * 23 * 4
    assert all(0 <= key < 1 << 63 for key in keys)
    assert row_key(1, "a", 2) == row_key(1, "a", 2)


# -- draws -----------------------------------------------------------------------------------------------------------

# The smallest of all floats is among them: only there can uniform * total round up to the total.
weights_with_zeros = st.lists(st.sampled_from([0.0, 5e-324]) | st.floats(1e-300, 1e3), min_size=1, max_size=12)
EXTREMES = [0.0, 2.0**-53, 1 - 2.0**-53]


@QUICK
@given(weights_with_zeros, st.floats(0, 1, exclude_max=True) | st.sampled_from(EXTREMES))
def test_inverse_cdf_against_a_loop(weights, u):
    got = int(pick(torch.tensor([weights], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)))
    total = 0.0
    cumulated = [total := total + w for w in weights]
    if total == 0:
        assert got == -1
        return
    assert weights[got] > 0
    above = [i for i, c in enumerate(cumulated) if c > u * total]
    assert got == (above[0] if above else cumulated.index(total))


@pytest.mark.parametrize("u", EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_index_of_weight_zero(u, dtype):
    """Leading, inner and trailing zeros at the ends of the unit interval, on laws that do not sum to 1 exactly."""
    law = torch.rand(200, 64, dtype=dtype)
    law[:, :5] = law[:, 20:30] = law[:, -7:] = 0
    law[::2] = law[::2] / law[::2].sum(-1, keepdim=True)
    uniform = torch.full((200,), u, dtype=torch.float64)
    got = pick(law, uniform)
    assert (law.gather(1, got[:, None]) > 0).all()
    assert (got == (5 if u == 0 else got)).all()
    assert (got == (56 if u > 0.5 else got)).all()
    assert pick(law[:, None], uniform[:, None]).shape == (200, 1)


def test_nothing_to_draw_gives_minus_one():
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.5, torch.nan, 0.5], [torch.nan] * 3, [0.0, 1.0, 0.0]])
    for u in EXTREMES:
        uniform = torch.full((4,), u, dtype=torch.float64)
        assert pick(weights, uniform).tolist() == [-1, -1, -1, 1]
    rng = CounterRng(torch.arange(4), torch.arange(4))
    assert rng.pick(weights).tolist() == [-1, -1, -1, 1]
    assert rng.draw(weights[:, None], 0)[:, 0].tolist() == [-1, -1, -1, 1]


@pytest.mark.parametrize("how", ["pick", "draw"])
def test_chi_square_of_50000_draws(how):
    law = warp(torch.randn(1, 40, dtype=torch.float64), 1.0, top_k=31)
    count = 50_000
    key = torch.tensor([row_key(0, i, 0) for i in range(count)])
    rng = CounterRng(key, torch.ones_like(key))
    wide = law.expand(count, -1)
    got = rng.pick(wide) if how == "pick" else rng.draw(wide[:, None], 3)[:, 0]
    seen = torch.bincount(got, minlength=40).double()
    used = law[0] > 0
    assert int(used.sum()) == 31 and (seen[~used] == 0).all()
    expected = law[0, used] * count
    chi2 = float(((seen[used] - expected) ** 2 / expected).sum())
    assert chi2 < 30 + 5 * math.sqrt(2 * 30)


@pytest.mark.parametrize("shape", [(1, 4096), (2, 3, 8192), (5, 100), (2, 4160), (1, 4097)])
@pytest.mark.parametrize("count", [1, 4, 70])
def test_the_largest_are_those_of_topk(shape, count):
    x = torch.randn(shape)
    x[..., ::7] = -torch.inf
    for rows in (x, torch.full(shape, -torch.inf).index_fill(-1, torch.tensor([shape[-1] - 1]), 1.0)):
        values, indices = largest(rows, count)
        assert torch.equal(values, rows.topk(count).values)
        assert torch.equal(rows.gather(-1, indices), values)
        assert all(len(set(row)) == count for row in indices.flatten(0, -2).tolist()), "each once"
    ties = torch.zeros(shape)
    assert torch.equal(largest(ties, 1)[1], ties.max(-1, keepdim=True).indices), "the first, as argmax gives it"
    x[..., 5] = torch.nan
    assert largest(x, count)[0][..., 0].isnan().all()
