"""The theory of speed: what always holds, what holds for independent drafts only, and the speedup from measured costs."""

import json
import random
import sys

import pytest
from canned import block, line, mode, step

from specresearch import cli
from specresearch.metrics import acceptance
from specresearch.results import read
from specresearch.run import Run
from specresearch.speed import (
    best_depth,
    identity,
    iid_length,
    positional_length,
    predicted_speedup,
    speedup,
    theory,
)
from specresearch.trees.optimal import best_parents


def sampled(rates_of_step, steps: int = 8_000, seed: int = 0) -> list[dict]:
    """Steps of a chain; `rates_of_step(rng)` gives a step's acceptance by depth."""
    rng, lengths = random.Random(seed), []
    rates = [rates_of_step(rng) for _ in range(steps)]
    for each in rates:
        lengths.append(1 + next((j for j, rate in enumerate(each) if rng.random() >= rate), len(each)))
    return [{"steps": [step(n, len(each)) for n, each in zip(lengths, rates)], "output_ids": [0] * (sum(lengths) + 1)}]


@pytest.mark.parametrize("seed", range(3))
def test_the_identity_is_the_mean_accepted_length(seed):
    lines = sampled(lambda rng: [rng.random() ** 2] * rng.randint(1, 6), steps=300, seed=seed)
    found = acceptance(lines)
    assert identity(found["acceptance_rate_by_depth"]) == pytest.approx(found["mean_accepted_length"], abs=1e-12)
    assert theory(lines)["identity"] == pytest.approx(found["mean_accepted_length"], abs=1e-12)


def test_the_iid_formula_sums_its_series():
    for rate in (0.0, 0.3, 0.9, 1.0):
        assert iid_length(rate, 5) == pytest.approx(sum(rate**j for j in range(6)))


def test_where_drafts_are_iid_both_formulas_hold():
    found = theory(sampled(lambda rng: [0.7] * 6))
    assert found["iid_first"] == pytest.approx(found["identity"], rel=0.02)
    assert found["iid_pooled"] == pytest.approx(found["identity"], rel=0.02)


def test_steps_of_unlike_difficulty_pull_the_formulas_apart():
    """Half the steps accept 0.95, half 0.45 (mean 0.7): first drafts tell too little, all drafts too much."""
    found = theory(sampled(lambda rng: [rng.choice([0.95, 0.45])] * 6))
    truth = (iid_length(0.95, 6) + iid_length(0.45, 6)) / 2
    assert found["identity"] == pytest.approx(truth, rel=0.02)
    assert found["iid_first"] == pytest.approx(iid_length(0.7, 6), rel=0.03)
    assert found["iid_first_gap"] < -0.5 and found["iid_pooled_gap"] > 0.1


def test_rates_that_fall_with_depth():
    found = theory(sampled(lambda rng: [0.8, 0.6, 0.4, 0.2]))
    assert found["identity"] == pytest.approx(1 + 0.8 + 0.48 + 0.192 + 0.0384, rel=0.02)
    assert found["iid_first_gap"] > 0.5 and abs(found["iid_pooled_gap"]) < 0.2


def test_a_run_that_drafted_nothing_has_no_rate():
    assert theory([]) == dict.fromkeys(("identity", "iid_first", "iid_first_gap", "iid_pooled", "iid_pooled_gap"))
    plain = theory([{"steps": [step(1, 0)] * 3}])
    assert (plain["identity"], plain["iid_first"]) == (1, None)


@pytest.mark.parametrize(
    ("draft", "rate", "depth", "gain"),
    [
        *[(0.05, 0.6, 4, 1.92), (0.05, 0.7, 6, 2.35), (0.05, 0.8, 8, 3.09), (0.05, 0.9, 13, 4.67)],
        *[(0.1, 0.7, 4, 1.98), (0.1, 0.8, 6, 2.47), (0.2, 0.8, 4, 1.87)],
    ],
)
def test_best_depth_where_a_pass_costs_the_same_for_any_tree(draft, rate, depth, gain):
    k, most = best_depth([rate**j for j in range(1, 65)], draft=draft, tree_pass=lambda nodes: 1.0)
    assert (k, round(most, 2)) == (depth, gain)
    own = speedup(iid_length(rate, k), levels=k, draft=draft, tree_pass=1.0)
    assert own == pytest.approx(most)


def test_drafts_dearer_than_their_worth_are_not_made():
    rates = [0.5**j for j in range(1, 9)]
    assert best_depth(rates, draft=0.51, tree_pass=lambda nodes: 1.0) == (0, 1.0)
    assert best_depth(rates, draft=0.49, tree_pass=lambda nodes: 1.0)[0] == 1
    assert best_depth(rates, draft=0.3, tree_pass=lambda nodes: 1.0, overhead=0.3)[0] == 0
    assert best_depth(rates, draft=0.1, tree_pass=lambda nodes: nodes)[0] == 0


def test_positional_length_agrees_with_the_search_for_the_best_tree():
    table = [[0.6, 0.2, 0.1], [0.5, 0.2], [0.4]]
    for size in (1, 2, 5, 9):
        parents, reach = best_parents(table, size)
        assert positional_length(parents, table) == pytest.approx(sum(reach))
    assert positional_length([-1, 0, 0, 1], [[0.5, 0.25], [0.5]]) == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    assert positional_length([-1, 0, 0], [[0.5]]) == pytest.approx(1.5), "the table knows no second child"


# -- the speedup from costs ------------------------------------------------------------------------------------------------

COSTS = {"target": {"1": 0.1, "2": 0.11, "4": 0.13, "8": 0.17}}


def exact(lines: list[dict], rows: int = 1, slower: float = 1.0) -> tuple[dict, list[dict]]:
    """A block whose passes took the time of COSTS; the prompts 1 s, drafts and the rest 0.02 s a pass."""
    steps = [len(each["tokens"]) for answer in lines for each in answer["steps"]]
    assert set(steps) == {4}
    passes, plain = len(steps) // rows, sum(len(each["output_ids"]) - 1 for each in lines) // rows
    tree, one = COSTS["target"][str(4 * rows)], COSTS["target"][str(rows)]
    made = block(0, lines, 1.0, 1.0)
    made["speculative"] = mode(lines, 1 + passes * (slower * tree + 0.02), passes, passes * slower * tree)
    made["baseline"] = mode(lines, 1 + plain * one, plain, plain * one)
    return made, lines


@pytest.mark.parametrize("rows", [1, 2])
def test_prediction_meets_a_run_whose_passes_cost_what_was_measured(rows):
    made, lines = exact([line(0, [1, 3, 2, 2], depth=3), line(1, [4, 1, 2, 1], depth=3)], rows)
    measured = made["baseline"]["seconds"] / made["speculative"]["seconds"]
    assert predicted_speedup([(made, lines)], COSTS) == pytest.approx(measured, rel=1e-12)


def test_slower_passes_open_a_gap():
    made, lines = exact([line(0, [1, 3, 2, 2], depth=3)], slower=1.5)
    right, _ = exact(lines)
    measured = made["baseline"]["seconds"] / made["speculative"]["seconds"]
    predicted = predicted_speedup([(made, lines)], COSTS)
    assert predicted == pytest.approx(predicted_speedup([(right, lines)], COSTS)) and predicted > 1.1 * measured


def test_blocks_without_plain_decoding_do_not_count():
    both, alone = exact([line(0, [1, 3, 2], depth=3)]), exact([line(1, [4, 4, 4], depth=3)])
    del alone[0]["baseline"]
    assert predicted_speedup([both, alone], COSTS) == predicted_speedup([both], COSTS)
    assert predicted_speedup([alone], COSTS) is None
    assert predicted_speedup([], COSTS) is None


# -- in a run ----------------------------------------------------------------------------------------------------------------


def command(monkeypatch, folder, *more: str) -> tuple[int, dict]:
    base = ["target=tiny", "drafter=ngram", "tracker=none", "limit=2", "max_new_tokens=8", f"hydra.run.dir={folder}"]
    monkeypatch.setattr(sys, "argv", ["specresearch", *base, *more])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    return exit.value.code, json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(("batch", "sizes"), [(1, ["1", "2", "4", "5"]), (2, ["1", "2", "4", "8", "10"])])
def test_a_run_measures_its_costs_and_shows_what_follows(monkeypatch, tmp_path, capsys, batch, sizes):
    shape = ["tree=static", "tree.widths=[2,1]", "drafter=small_lm", "drafter.layers=1"]
    status, summary = command(monkeypatch, tmp_path / "run", f"batch_size={batch}", *shape)
    costs = summary["costs"]["target"]
    assert status == 0 and list(costs) == sizes
    assert all(seconds > 0 for seconds in costs.values())
    assert f"predicted {summary['predicted_speedup']:.2f}x from measured costs" in " ".join(
        capsys.readouterr().out.split()
    )
    run = read(tmp_path / "run")
    assert summary["predicted_speedup"] == predicted_speedup(run.by_block(), run.summary["costs"])


def test_without_a_baseline_no_costs_are_measured(monkeypatch, tmp_path, capsys):
    _, summary = command(monkeypatch, tmp_path / "run", "baseline=false")
    assert summary["costs"] is None and summary["predicted_speedup"] is None
    assert "predicted" not in capsys.readouterr().out


def test_interrupted_while_costs_are_measured(monkeypatch, tmp_path, capsys):
    def tired(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "costs", tired)
        status, summary = command(monkeypatch, tmp_path / "run")
    assert status == 130 and summary["costs"] is None and summary["prompts"] == 2
    monkeypatch.setattr(sys, "argv", ["specresearch", f"resume={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["costs"]["target"]["1"] > 0
