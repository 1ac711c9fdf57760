"""The judge of temperature 0: each planted fault is named for what it is, and a near-tie is not called a fault."""

import pytest
import torch
from conftest import PROMPTS
from helpers import accept_all_drafts, decode

from specresearch.drafters.ngram import NGram
from specresearch.drafters.none import NoDrafter
from specresearch.drafters.small_lm import SmallLM
from specresearch.lossless.greedy import GreedyJudge, calibrate, verdict_of
from specresearch.models import tiny
from specresearch.models.hf import HFModel
from specresearch.sampling import Sampler
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.static import StaticTree
from specresearch.types import TargetOutput


@pytest.fixture
def model() -> HFModel:
    return tiny.load(dtype="float32", device="cpu")


@pytest.fixture
def answers(model):
    """Plain and speculative lines of all prompts, and their judgement, under whatever fault is planted by then."""
    prompts = [model.chat([{"role": "user", "content": text}]) for text in PROMPTS]

    def make(fault=lambda: None, sampler=None, batch=1):
        sampler = sampler or Sampler()
        common = {"sampler": sampler, "budget": 32, "batch": batch}
        root = StaticTree(temperature=0, parents=[-1])
        plain = decode(model, prompts, drafter=NoDrafter(model), policy=root, **common)
        fault()
        policy = DynamicTree(depth=3, topk=3, size=8, temperature=0)
        drafter = SmallLM(model, layers=1)
        lines = [t.line() for t in decode(model, prompts, drafter=drafter, policy=policy, **common)]
        judge = GreedyJudge(model, sampler, exact_replay=batch == 1, tree_size=64)
        return [judge.compare(line, turn.output_ids) for line, turn in zip(lines, plain)], lines, judge

    return make


def verdicts(results):
    return {entry["verdict"] for result in results for entry in result["violations"]}


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(repetition_penalty=1.2)])
def test_a_right_run_is_lossless(answers, sampler):
    results, lines, judge = answers(sampler=sampler)
    assert all(result["equal"] for result in results)
    assert verdict_of(results, drafted=1) == "lossless"
    assert verdict_of(results, drafted=0) == "not_exercised"
    assert all(judge.compare(line, None)["equal"] for line in lines), "teacher forcing must agree"


def test_a_wrong_token_is_a_violation_wherever_it_stands(answers):
    _, lines, judge = answers()
    for place in (0, 1, 9, 31):
        line = dict(lines[0], output_ids=list(lines[0]["output_ids"]))
        line["output_ids"][place] = (line["output_ids"][place] + 1) % 256
        found = judge.compare(line, lines[0]["output_ids"])
        assert not found["equal"]
        assert found["violations"][0]["position"] == place
        assert found["violations"][0]["verdict"] == "verifier_bug"


def test_verifier_that_takes_wrong_children(answers, monkeypatch):
    results, _, _ = answers(lambda: accept_all_drafts(monkeypatch))
    assert verdict_of(results, 1) == "violation"
    assert verdicts(results) == {"verifier_bug"}


def test_positions_off_by_one(answers, monkeypatch):
    run = HFModel.run

    def shifted(self, tokens, positions, length, mask, extent, **kwargs):
        wide = tokens.shape[1] > 1 and kwargs.get("rows") is None and len(self.blocks) > 1
        return run(self, tokens, positions + wide, length, mask, extent, **kwargs)

    results, _, _ = answers(lambda: monkeypatch.setattr(HFModel, "run", shifted))
    assert "forward_bug" in verdicts(results)


def test_stale_cache(answers, monkeypatch):
    """Accepted paths are not compacted: the wrong K and V stay. The first wrong answer is the forward's."""
    results, _, _ = answers(lambda: monkeypatch.setattr(HFModel, "commit", lambda self, step, verdict: None))
    assert verdict_of(results, 1) == "violation"


def test_decoy_leaks_into_the_mask(answers, monkeypatch):
    from specresearch.models import hf

    seen = lambda parent: torch.ones(*parent.shape, parent.shape[1], dtype=torch.bool).tril()  # noqa: E731
    results, _, _ = answers(lambda: monkeypatch.setattr(hf, "ancestors", seen))
    assert "forward_bug" in verdicts(results)


@pytest.mark.parametrize("nudge", [0.0, 1e-6])
def test_ties_are_no_faults(model, monkeypatch, nudge):
    """Two tokens with one and the same embedding tie everywhere; the verify pass breaks the tie the other way round."""
    first, twin = 97, 200
    with torch.no_grad():
        model.head.weight[twin] = model.head.weight[first]
        model.head.weight *= 1.0
    prompt = [first] * 12
    lookup = NGram(model, max_n=2, min_n=1, order="recency", backoff=0.001)
    policy = DynamicTree(depth=3, topk=3, size=8, temperature=0)
    with torch.no_grad():  # make the pair the argmax everywhere
        model.head.weight[[first, twin]] *= 30
    plain = decode(model, [prompt], drafter=NoDrafter(model), policy=StaticTree(temperature=0, parents=[-1]), budget=16)
    forward = HFModel.forward

    def nudged(self, step, tree, taps):
        output = forward(self, step, tree, taps)
        logits = output.logits.clone()
        if tree.tokens.shape[1] > 1:
            logits[..., twin] += nudge + 1e-6 * logits[..., twin].abs()
        return TargetOutput(logits, output.features)

    monkeypatch.setattr(HFModel, "forward", nudged)
    (turn,) = decode(model, [prompt], drafter=lookup, policy=policy, budget=16)
    if turn.output_ids == plain[0].output_ids:
        pytest.skip("the pair is not the argmax on this seed")
    judge = GreedyJudge(model, Sampler(), exact_replay=True, tree_size=64)
    judge.noise = calibrate(judge.target, turn.line())
    object.__setattr__(judge.noise, "gap", 1e-3)
    object.__setattr__(judge.noise, "logit", 1e-3)
    found = judge.compare(turn.line(), plain[0].output_ids)
    assert not found["violations"]
    assert found["near_ties"]
    assert {entry["verdict"] for entry in found["near_ties"]} <= {"tie", "near_tie"}
    assert verdict_of([found], 1) == "near_tie"


def test_an_answer_that_breaks_off_is_a_violation(answers):
    _, lines, judge = answers()
    short = dict(lines[0], output_ids=lines[0]["output_ids"][:-2])
    assert judge.compare(short, lines[0]["output_ids"])["violations"]


def test_batched_runs_are_judged_too(answers):
    results, _, _ = answers(batch=3)
    assert verdict_of(results, 1) in ("lossless", "near_tie")


def test_bfloat16_reports_near_ties_as_such():
    model = tiny.load(dtype="bfloat16", device="cpu", layers=3)
    prompts = [model.chat([{"role": "user", "content": text * 3}]) for text in PROMPTS]
    common = {"budget": 40}
    plain = decode(model, prompts, drafter=NoDrafter(model), policy=StaticTree(temperature=0, parents=[-1]), **common)
    policy = DynamicTree(depth=3, topk=4, size=12, temperature=0)
    turns = decode(model, prompts, drafter=SmallLM(model, layers=2), policy=policy, **common)
    judge = GreedyJudge(model, Sampler(), exact_replay=True, tree_size=64)
    results = [judge.compare(t.line(), p.output_ids) for t, p in zip(turns, plain)]
    assert not verdicts(results), [entry for r in results for entry in r["violations"]]


def test_path_of_the_verdict_is_what_was_committed(model):
    """`Verdict` and trace agree: replaying a recorded step gives the logits that chose its tokens."""
    prompt = model.chat([{"role": "user", "content": PROMPTS[2]}])
    policy = DynamicTree(depth=3, topk=3, size=8, temperature=0)
    (turn,) = decode(model, [prompt], drafter=SmallLM(model, layers=1), policy=policy, budget=32)
    judge = GreedyJudge(model, Sampler(), exact_replay=True, tree_size=64)
    model.reserve(1, len(prompt) + 40, 64)
    for at, token in enumerate(turn.output_ids):
        assert int(judge._replay(turn.line(), at).argmax()) == token
