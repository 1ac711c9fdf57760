"""The built-in target, for real: greedy equality with transformers' own `generate` for each drafter, sampling end to end."""

import json
import sys

import pytest
from helpers import decode

from specresearch import cli
from specresearch.drafters.ngram import NGram
from specresearch.drafters.none import NoDrafter
from specresearch.drafters.small_lm import SmallLM
from specresearch.models import smollm2
from specresearch.models.hf import HFModel
from specresearch.prompts import builtin
from specresearch.sampling import Sampler
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.static import Chain

TOKENS = 24


@pytest.fixture(scope="module")
def real() -> HFModel:
    return smollm2.load(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts(real):
    return [real.chat([{"role": "user", "content": question.turns[0]}]) for question in builtin()[:7]]


@pytest.fixture(scope="module")
def expected(real, prompts):
    return [real.generate(prompt, TOKENS, Sampler(), ()) for prompt in prompts]


@pytest.mark.parametrize("name", ["none", "ngram", pytest.param("early_exit", marks=pytest.mark.slow)])
def test_greedy_equals_transformers_generate(real, prompts, expected, name):
    drafter = {
        "none": lambda: NoDrafter(real),
        "ngram": lambda: NGram(real, max_n=4, min_n=2, order="recency", backoff=0.001),
        "early_exit": lambda: SmallLM(real, layers=6),
    }[name]()
    policy = DynamicTree(depth=4, topk=3, size=8, temperature=0)
    turns = decode(real, prompts, drafter=drafter, policy=policy, budget=TOKENS, batch=3)
    assert [turn.output_ids for turn in turns] == expected


def test_sampling_on_a_chain(real, prompts):
    """At temperature 1 the early exit's draws are judged by the rule of Leviathan et al.; some are taken, some are not."""
    policy = Chain(depth=3, temperature=1.0)
    sampler = Sampler(temperature=1.0, top_p=0.95)
    drafter = SmallLM(real, layers=12)
    turns = decode(real, prompts[:3], drafter=drafter, policy=policy, sampler=sampler, budget=TOKENS, batch=3)
    emitted = {step["emitted"] for turn in turns for step in turn.steps}
    assert min(emitted) == 1
    assert max(emitted) > 1
    assert turns[0].output_ids != turns[1].output_ids


@pytest.mark.slow
def test_the_command_at_temperature_1(real, tmp_path, monkeypatch):
    arguments = ["drafter=ngram", "temperature=1", "limit=7", "max_new_tokens=12", "batch_size=4", "tracker=none"]
    monkeypatch.setattr(sys, "argv", ["specresearch", *arguments, "baseline=false", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["prompts"] == 7
    assert summary["lossless"]["verdict"] == "consistent"
    assert summary["lossless"]["tokens"] == summary["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [["drafter=ngram"], ["drafter=small_lm", "drafter.layers=6"], ["batch_size=4"]])
def test_every_answer_of_the_builtin_prompts_is_lossless(tmp_path, monkeypatch, options):
    arguments = ["limit=14", "max_new_tokens=64", "tracker=none", *options]
    monkeypatch.setattr(sys, "argv", ["specresearch", *arguments, f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["lossless"]["verdict"] == "lossless"
    if "drafter=ngram" in options:
        assert summary["mean_accepted_length"] > 1.2
        assert summary["by_kind"]["code_edit"]["mean_accepted_length"] > 1.8
        time = summary["time"]
        assert (time["other"] + time["verify"] + time["commit"]) / sum(time.values()) < 0.1
