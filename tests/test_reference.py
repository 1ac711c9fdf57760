"""The laws that the black box is given: p of the plain forward, q of the last tokens alone; files of other engines' tokens."""

import json

import pytest
import torch
from helpers import decode

from specresearch.drafters.small_lm import SmallLM
from specresearch.lossless import reference
from specresearch.lossless.blackbox import BlackBox
from specresearch.lossless.reference import Reference, judge, of_lines
from specresearch.models import tiny
from specresearch.sampling import Sampler
from specresearch.trees.static import Chain
from specresearch.types import UserError

SAMPLER = Sampler(temperature=0.8, top_p=0.9, repetition_penalty=1.3, logit_bias={7: 2.0})


def law(target, sampler, prefix, context=None):
    """One prefix, one forward."""
    ids = torch.tensor([prefix])
    seen = ids if context is None else ids[:, -context:]
    with torch.no_grad():
        logits = target.model(input_ids=seen).logits[:, -1:]
    return sampler.warp(sampler.process(logits, ids, torch.tensor([len(prefix)])))[0, 0]


@pytest.mark.parametrize("prompt", [1, 3, 20])
def test_rows_are_the_laws_of_each_prefix(target, prompt, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", 16)
    ids = torch.randint(256, (prompt + 37,), generator=torch.Generator().manual_seed(0)).tolist()
    p, q = Reference(target, SAMPLER, context=4).rows(ids[:prompt], ids[prompt:])
    assert p.shape == q.shape == (37, target.vocab_size)
    for i in range(37):
        prefix = ids[: prompt + i]
        assert (p[i] - law(target, SAMPLER, prefix)).abs().max() < 1e-6
        seen = min(4 + i % 4, len(prefix))
        assert (q[i] - law(target, SAMPLER, prefix, seen)).abs().max() < 1e-6


def test_a_window_for_each_place(target):
    ids = list(range(30))
    _, q = Reference(target, SAMPLER, context=5, stride=1).rows(ids[:3], ids[3:])
    for i in range(27):
        assert (q[i] - law(target, SAMPLER, ids[: 3 + i], 5)).abs().max() < 1e-6


def test_another_model_may_be_the_weak_draft(target):
    ids, draft = list(range(30)), target.first_layers(1)
    _, q = Reference(target, SAMPLER, draft=draft).rows(ids[:3], ids[3:])
    assert (q[20] - law(draft, SAMPLER, ids[:23])).abs().max() < 1e-6


def test_q_is_no_p_where_the_prefix_is_longer(target):
    ids = list(range(40))
    p, q = Reference(target, Sampler(temperature=1), context=4).rows(ids[:20], ids[20:])
    assert ((p - q).abs().sum(-1) > 0.01).all()


def test_head_rows_are_chosen_or_cut_after(target, monkeypatch):
    ids, places = torch.arange(24).reshape(2, 12), torch.tensor([3, 11])
    assert target.chooses
    chosen = target.plain(ids, places)
    monkeypatch.setattr(target, "chooses", False)
    assert (target.plain(ids, places) - chosen).abs().max() < 1e-9
    assert chosen.shape == (2, 2, target.vocab_size)


def test_a_sampled_run_is_consistent_and_a_foreign_one_is_not():
    model = tiny.load(dtype="float32", device="cpu")
    prompts = [[3, 4, 5, 6, 7], [9], [1, 2] * 6]
    sampler = Sampler(temperature=0.9)
    common = {"drafter": SmallLM(model, layers=1), "policy": Chain(depth=3, temperature=0.9), "budget": 120}
    lines = [turn.line() for turn in decode(model, prompts, sampler=sampler, **common)]
    box = judge(Reference(model, sampler), lines, BlackBox())
    assert box.tokens == sum(len(line["output_ids"]) for line in lines)
    assert box.verdict == "consistent" and list(box.prompts) == [0, 1, 2]
    other = judge(Reference(model, Sampler(temperature=0.6)), lines, BlackBox())
    assert other.verdict == "violation"


def test_files_of_tokens(tmp_path):
    path = tmp_path / "x.jsonl"
    good = [{"prompt_ids": [1], "output_ids": [2, 3], "steps": []}, {"id": "b", "prompt_ids": [1], "output_ids": []}]
    path.write_text("\n".join(json.dumps(line) for line in good) + "\n\n")
    first, second = of_lines(path)
    assert first == {"id": 1, "turn": 0, "prompt_ids": [1], "output_ids": [2, 3]}
    assert second["id"] == "b"
    for text, says in (
        ("{", "line 1 is not JSON"),
        ("[]", "object"),
        ('{"prompt_ids": [1]}', '"output_ids"'),
        ('{"prompt_ids": [1.5], "output_ids": [1]}', '"prompt_ids"'),
        ('{"prompt_ids": [true], "output_ids": [1]}', '"prompt_ids"'),
        ('{"prompt_ids": [-1], "output_ids": [1]}', '"prompt_ids"'),
        ('{"prompt_ids": [], "output_ids": [1]}', "no prefix"),
        ('{"prompt_ids": [1], "output_ids": []}', "no output tokens"),
        ('{"id": [1], "prompt_ids": [1], "output_ids": [1]}', "the id"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=says) as caught:
            of_lines(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        of_lines(tmp_path / "missing.jsonl")


def test_what_the_target_cannot_judge_is_said(target):
    own = Reference(target, Sampler(temperature=1))
    for prompt, output, says in (([], [1], "no prefix"), ([1], [9999], "vocabulary")):
        with pytest.raises(UserError, match=says):
            own.rows(prompt, output)
    with pytest.raises(UserError, match="context"):
        Reference(target, Sampler(temperature=1), context=0)
