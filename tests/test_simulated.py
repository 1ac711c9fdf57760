"""Accepted lengths that are dictated: as asked for, row by row, on every tree; and the text stays the target's."""

import json

import pytest
import torch
from helpers import decode, naive_greedy, trees

from specresearch.build import engine
from specresearch.cli import main
from specresearch.drafters.simulated import Simulated, rate_of
from specresearch.drafters.small_lm import SmallLM
from specresearch.fit import check_fit
from specresearch.models import random_weights, tiny
from specresearch.replay import recordings
from specresearch.rng import CounterRng
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.optimal import acceptance_of_trace
from specresearch.trees.static import Chain, StaticTree
from specresearch.types import UserError
from specresearch.verifiers.greedy import Greedy
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch

PROMPTS = [
    list(b"The first question."),
    list(b"Another one, longer than that."),
    list(b"A third?"),
    list(b"Last, and done."),
]
BUDGET = 32


@pytest.fixture(scope="module")
def target():
    model = tiny.load(dtype="float64")
    model.eos = ()  # answers end by their budget
    return model


@pytest.fixture(scope="module")
def plain(target):
    return [naive_greedy(target, prompt, BUDGET) for prompt in PROMPTS]


def simulate(target, plain, policy, batch=1, verifier=None, **keys):
    """-> the turns; all answers must be the target's own."""
    return answered(target, plain, policy, batch, verifier, **keys)[0]


def answered(target, plain, policy, batch=1, verifier=None, **keys):
    """-> the turns, the drafter"""
    drafter = Simulated(target, **{"length": 3.2, "method": "match_expected"} | keys)
    for prompt, answer in zip(PROMPTS, plain):
        drafter.foretell(prompt, answer)
    turns = decode(target, PROMPTS, drafter=drafter, policy=policy, batch=batch, budget=BUDGET, verifier=verifier)
    assert [turn.output_ids for turn in turns] == plain
    return turns, drafter


def lengths(turn):
    """Of all steps but the last, which the budget may cut."""
    return [step["emitted"] for step in turn.steps][:-1]


@pytest.mark.parametrize("name", list(trees()))
@pytest.mark.parametrize("batch", [1, 3])
def test_each_row_has_the_mean_exactly_whatever_the_tree(target, plain, name, batch):
    policy = trees()[name]
    wanted = {1: 1.6, 3: 2.75}[batch]
    for turn in simulate(target, plain, policy, batch, length=wanted):
        found = lengths(turn)
        assert set(found) <= {int(wanted), int(wanted) + 1}
        for count in range(1, len(found) + 1):
            assert abs(sum(found[:count]) - count * wanted) < 1


def test_the_mean_over_phases_is_exact(target):
    """Averaged over the random phase, each single step has the mean: no bias from rounding the length."""
    policy, drafter = Chain(depth=4, temperature=0), Simulated(target, length=2.3, method="match_expected")
    ids = torch.arange(1000) * ((1 << 31) // 1000)
    step = type("Step", (), {"row_id": ids, "live": torch.ones(1000, dtype=torch.bool)})
    drafter.reserve(1000, 8, 5)
    for _ in range(5):
        found = drafter._matched(step, torch.full((1000,), policy.depth + 1))
        drafter.count += 1
        assert found.double().mean() == pytest.approx(2.3, abs=1e-3)


@pytest.mark.parametrize(("wanted", "found"), [(0.2, 1), (1, 1), (5, 5), (40, 5)])
def test_clamped_at_both_ends(target, plain, wanted, found):
    for turn in simulate(target, plain, Chain(depth=4, temperature=0), batch=2, length=wanted):
        assert set(lengths(turn)) == {found}


def test_a_path_that_is_no_first_child_is_used_to_its_end(target, plain):
    policy = StaticTree(temperature=0, parents=[-1, 0, 0, 2, 3, 3])
    for turn in simulate(target, plain, policy, length=9):
        assert set(lengths(turn)) == {4}


def test_rows_do_not_move_in_step(target, plain):
    turns = simulate(target, plain, Chain(depth=4, temperature=0), batch=4, length=2.3)
    assert len({tuple(lengths(turn)[:6]) for turn in turns}) > 1


def test_alone_and_in_a_batch_the_lengths_are_the_same(target, plain):
    for keys in ({}, {"method": "bernoulli", "rates": [0.8, 0.5]}):
        one, three = (simulate(target, plain, trees()["dynamic"], batch, **keys) for batch in (1, 3))
        assert [lengths(turn) for turn in one] == [lengths(turn) for turn in three]


@pytest.mark.parametrize("verifier", [Greedy(), SampleAndMatch(), Rejection()])
def test_every_rule_that_takes_points_serves(target, plain, verifier):
    simulate(target, plain, trees()["static"], 2, verifier)


def test_bernoulli_rates_by_depth(target):
    rates = [0.9, 0.5, 0.0]
    drafter = Simulated(target, length=1, method="bernoulli", rates=rates)
    rows = torch.arange(20_000)
    step = type("Step", (), {"root": rows, "rng": CounterRng(rows, torch.ones_like(rows))})
    found = drafter._tried(step, 5)
    for depth in range(1, 4):
        expected = float(torch.tensor(rates[:depth]).prod())
        assert float((found > depth).double().mean()) == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize(("length", "levels"), [(3.2, 5), (1.5, 2), (1, 4), (6, 5), (9, 5)])
def test_one_rate_from_a_mean(length, levels):
    rate = rate_of(length, levels)
    assert sum(rate**j for j in range(levels + 1)) == pytest.approx(min(length, levels + 1), abs=1e-6)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_trace_gives_the_schedule_of_the_real_run(target, plain, tmp_path, batch):
    """Same emitted lengths, same tree sizes, step for step and pass for pass."""
    policy = DynamicTree(depth=3, topk=3, size=8, temperature=0)
    real = decode(target, PROMPTS, drafter=SmallLM(target, layers=1), policy=policy, batch=batch, budget=BUDGET)
    (tmp_path / "trace.jsonl").write_text("\n".join(json.dumps(turn.line()) for turn in real))
    simulated = simulate(target, plain, policy, batch, method="trace", trace=str(tmp_path))
    for mine, theirs in zip(simulated, real):
        assert [step["emitted"] for step in mine.steps] == [step["emitted"] for step in theirs.steps]
        assert [len(step["tokens"]) for step in mine.steps] == [len(step["tokens"]) for step in theirs.steps]
    assert len({step["emitted"] for turn in real for step in turn.steps}) > 1  # there was something to follow


def test_what_no_tree_can_hold_is_said(target, plain, tmp_path):
    chain = Chain(depth=2, temperature=0)
    _, drafter = answered(target, plain, chain, length=3.2)
    assert drafter.simulated.endswith("a tree of depth 2 emits 3 at most") and drafter.simulated.count("depth") == 1
    assert "at most" not in answered(target, plain, chain, length=3.0)[1].simulated
    assert "1 at least" in answered(target, plain, chain, length=0.5)[1].simulated
    longer = simulate(target, plain, Chain(depth=4, temperature=0))
    (tmp_path / "trace.jsonl").write_text("\n".join(json.dumps(turn.line()) for turn in longer))
    assert "3 at most" in answered(target, plain, chain, method="trace", trace=str(tmp_path))[1].simulated


def test_a_trace_of_shorter_answers_is_refused(target, plain, tmp_path):
    turns = simulate(target, plain, Chain(depth=2, temperature=0))
    lines = [turn.line() | {"steps": turn.line()["steps"][:3]} for turn in turns]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match="the same max_new_tokens"):
        simulate(target, plain, Chain(depth=2, temperature=0), method="trace", trace=str(tmp_path))


def test_a_text_that_leaves_what_was_foretold_gets_no_drafts_that_fit(target, plain):
    wrong = [[*answer[:10], (answer[10] + 1) % 257, *answer[11:]] for answer in plain]
    drafter = Simulated(target, length=3, method="match_expected")
    for prompt, answer in zip(PROMPTS, wrong):
        drafter.foretell(prompt, answer)
    turns = decode(target, PROMPTS, drafter=drafter, policy=Chain(depth=4, temperature=0), budget=BUDGET)
    assert [turn.output_ids for turn in turns] == plain
    for turn in turns:
        later = [step["emitted"] for step in turn.steps][6:]
        assert sum(later) <= len(later) + 2  # a decoy is right now and then


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"method": "often"}, "match_expected, bernoulli, trace"),
        ({"length": "long"}, "drafter.length=long"),
        ({"rates": [0.5]}, "method=bernoulli"),
        ({"method": "bernoulli", "rates": [1.5]}, "drafter.rates"),
        ({"method": "trace"}, "drafter.trace=RUN_DIR"),
        ({"method": "trace", "trace": "/nowhere"}, "cannot be read"),
    ],
)
def test_mistakes_are_said_in_one_line(target, keys, says):
    with pytest.raises(UserError, match=says):
        Simulated(target, **{"length": 3.2, "method": "match_expected"} | keys)


def test_refused_above_temperature_0_and_where_children_are_drawn(target):
    drafter = Simulated(target, length=2, method="match_expected")
    with pytest.raises(UserError, match="use 0"):
        check_fit(drafter, Chain(depth=2, temperature=0), Rejection(), 0.7, "refuse")
    with pytest.raises(UserError, match=r"tree\.draw=topk"):
        check_fit(drafter, Chain(depth=2, temperature=1), Rejection(), 0.0, "refuse")


def test_from_python_the_result_is_marked(target):
    made = engine("drafter=simulated", "drafter.length=2", "tree=chain", "max_new_tokens=12", target=target)
    result = made.generate("Hello")
    assert result.simulated
    assert set(result.accepted_lengths[:-1]) == {2}


@pytest.mark.parametrize("baseline", ["true", "false"])
def test_a_run_is_marked_everywhere(tmp_path, monkeypatch, capsys, baseline):
    given = "target=tiny target.dtype=float64 drafter=simulated drafter.length=2 limit=3 batch_size=2 max_new_tokens=17"
    argv = [*given.split(), "tracker=none", f"baseline={baseline}", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["specresearch", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["lossless"]["verdict"] == "simulated"
    assert summary["lossless"]["judged"] == "lossless"
    assert "match_expected" in summary["simulated"]
    assert summary["mean_accepted_length"] == pytest.approx(2, abs=0.01)
    assert "SIMULATED" in capsys.readouterr().out
    assert "SIMULATED" in (tmp_path / "report.html").read_text()
    assert all(json.loads(line)["simulated"] for line in (tmp_path / "trace.jsonl").read_text().splitlines())
    with pytest.raises(UserError, match="simulated"):
        list(recordings([str(tmp_path)]))
    with pytest.raises(UserError, match="simulated"):
        acceptance_of_trace(tmp_path / "trace.jsonl")


# -- random weights --------------------------------------------------------------------------------------------------------

PUBLISHED = {
    **{"llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "llama-2-7b": 6_738_415_616},
    **{"smollm2-135m": 134_515_008, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360},
}


def test_shapes_have_the_published_numbers_of_parameters():
    known = random_weights.shapes()
    assert {name: known[name].parameters for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_random_target_is_what_its_shape_says_and_is_decided(family, tied):
    sizes = {"hidden": 64, "mlp": 96, "layers": 3, "heads": 4, "kv_heads": 2, "head": 16, "vocab": 1000, "context": 256}
    shape = random_weights.Shape(family, **sizes, theta=1e4, tied=tied)
    model = random_weights.make(shape, torch.float32, torch.device("cpu"), 0)
    assert sum(weight.numel() for weight in model.parameters()) == shape.parameters
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    found = model(torch.tensor([[5, 77, 999, 3]])).logits[0]
    best = found.topk(2)
    assert best.indices[:, 0].tolist() == ([5, 77, 999, 3] if tied else [6, 78, 0, 4])
    assert ((best.values[:, 0] - best.values[:, 1]) > 0.1 * best.values[:, 0]).all()


def test_a_shape_that_does_not_fit_is_refused_with_the_figure_needed():
    shape, cpu = random_weights.shapes()["llama-3.1-8b"], torch.device("cpu")
    with pytest.raises(
        UserError, match=r"needs 32\.1 GB .* in float32, 16\.1 GB in bfloat16, and 20\.0 GB .*bfloat16 or"
    ):
        random_weights.require_memory("llama-3.1-8b", shape, torch.float32, cpu, 20 * 10**9)
    with pytest.raises(UserError, match=r"use a smaller target\.shape"):
        random_weights.require_memory("llama-3.1-8b", shape, torch.bfloat16, cpu, 10**9)
    random_weights.require_memory("llama-3.1-8b", shape, torch.bfloat16, cpu, 17 * 10**9)
    with pytest.raises(UserError, match="qwen3-8b"):
        random_weights.load(shape="gpt-9")
