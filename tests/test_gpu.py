"""experiments/gpu.py, on the toy target: its figures are those of the runs it makes, and nothing of Hydra or W&B is loaded."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from test_graphs import Recorded
from test_step_graph import Steps

EXPERIMENTS = str(Path(__file__).parents[1] / "experiments")
SAID = {"shape": "tiny", "context": "24", "tokens": "21", "length": "2.5", "rounds": "2"}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("gpu")


def test_rows_and_passes_are_measured_and_shown(gpu, target):
    made = gpu.measure(target, SAID, lambda what: None)
    assert list(made["rows"]) == ["plain", *gpu.TREES] and len(made["rates"]) == 2
    for name, rounds in made["rows"].items():
        for one in rounds:
            assert one["tokens"] == 20 and one["steps"] == (20 if name == "plain" else 8)
            assert one["seconds"]["prefill"] == 0 < one["seconds"]["target"]
    assert list(made["passes"]) == ["engine"], "on a CPU nothing is recorded"
    shown = gpu.table(made | {"weights": 1, "cache": 1, "said": SAID, "where": "here", "shape_bytes": "tiny"})
    (chain,) = (line for line in shown.splitlines() if line.startswith("| chain of 4"))
    assert chain.split("|")[2].strip() == "2.50"
    one, plain = (gpu._median(made["rows"][name]) for name in ("chain of 4", "plain"))
    assert chain.split("|")[4].strip() == f"{one['rate'] / plain['rate']:.2f}"
    assert "SIMULATED" in shown and "one CUDA graph: 0 of 52 steps" in shown


def test_on_a_gpu_steps_are_recorded_and_launched_in_turns(gpu, target, monkeypatch):
    """A stand-in records; what the device is called is all that a GPU is here."""
    monkeypatch.setattr("specresearch.decode.StepGraphs", Steps)
    monkeypatch.setattr(gpu, "ways_of", lambda target: ("", gpu.LAUNCHED))
    own = Recorded(target.model, target.tokenizer, target.name)
    made = gpu.measure(own, SAID, lambda what: None)
    assert list(made["rows"])[:3] == ["plain", "plain, launched", "chain of 4"]
    for name, rounds in made["rows"].items():
        graphs = [one["graphs"] for one in rounds]
        assert graphs == [0, 0] if name.endswith(gpu.LAUNCHED) else min(graphs) > 4
    shown = gpu.table(made | {"weights": 1, "cache": 1, "said": SAID, "where": "here", "shape_bytes": "tiny"})
    assert "one CUDA graph: 52 of 52 steps" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("shap=x", "shap is unknown"),
        ("tokens=1", "at least 2"),
        ("length=abc", "number of tokens"),
        ("rounds=²", "at least 1"),
        ("shape=x", "x is"),
    ],
)
def test_mistakes_are_said_in_one_line(gpu, given, said):
    with pytest.raises(SystemExit, match=said):
        gpu.main([given])


def test_it_runs_where_neither_hydra_nor_wandb_is_installed():
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(['hydra', 'omegaconf', 'wandb', 'datasets', 'gguf'])); import gpu"
    )
    subprocess.run([sys.executable, "-c", blocked], check=True, cwd=EXPERIMENTS)
