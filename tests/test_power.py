"""The power experiment on a small synthetic pool: its laws are what they say, its table tells faults from none."""

import importlib.util
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def power():
    spec = importlib.util.spec_from_file_location("power_experiment", ROOT / "experiments" / "power.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(24, 50, generator=generator)
    other = logits + 1.5 * torch.randn(24, 50, generator=generator)
    return {"p": logits.softmax(-1), "q": other.softmax(-1)}


def test_laws_are_distributions_and_the_right_chain_is_p(power, made):
    p, q = made["p"], made["q"]
    assert (power.chain(q, p / q, power.residual(p, q)) - p).abs().max() < 1e-6
    for name, law in power.LAWS.items():
        claimed, true = law(p, q)
        assert (true.sum(-1) - 1).abs().max() < 1e-5 and (true >= 0).all(), name
        assert ((claimed - true).abs().sum(1).mean() > 0.02) == (name != "none (null)"), name


def test_faults_alarm_and_none_does_not(power, made):
    def cells(name):
        return [cell.strip() for cell in power.row(name, made, null=100, faulty=50).split("|")]

    none = cells("none (null)")
    assert none[2] == "0.000" and none[3] == none[4] == "-" and none[5] == "0 of 100"
    fault = cells("argmax draft, softmax q")
    assert fault[5] == "50 of 50" and 0 < int(fault[3]) <= int(fault[4]) < 2000


def test_the_pool_is_kept(power, made, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(power, "record", lambda overrides: asked.append(overrides) or made)
    for _ in range(2):
        again = power.pool(str(tmp_path / "pool.safetensors"), ["target=tiny"])
        assert all(torch.equal(again[key], made[key]) for key in made)
    assert asked == [["target=tiny"]]
