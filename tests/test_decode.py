"""The loop: equal to a naive loop at temperature 0, independent of the batch above it, exact at every kind of end."""

import pytest
import torch
from conftest import PROMPTS
from helpers import decode, drafters, naive_greedy, trees

from specresearch.drafters.small_lm import SmallLM
from specresearch.sampling import Sampler
from specresearch.trees.static import Chain
from specresearch.types import Drafter, Tree, UserError
from specresearch.verifiers.greedy import Greedy
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.target_only import TargetOnly

DRAFTERS = ["none", "ngram", "small_lm", "early_exit"]
TREES = ["chain", "dynamic", "static", "best_first", "optimal"]


@pytest.fixture(scope="module")
def prompts(target):
    return [target.chat([{"role": "user", "content": text}]) for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(target, prompts):
    return [naive_greedy(target, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_equals_naive_loop(target, draft_folder, prompts, expected, name, tree, batch):
    turns = decode(target, prompts, drafter=drafters(target, draft_folder)[name], policy=trees()[tree], batch=batch)
    assert [turn.output_ids for turn in turns] == expected
    for turn in turns:
        assert 1 + sum(step["emitted"] for step in turn.steps) == len(turn.output_ids)
    if name != "none":
        assert any(step["emitted"] > 1 for turn in turns for step in turn.steps), "nothing was ever accepted"


class Oracle(Drafter):
    """Knows the answer; everything that it proposes is accepted. (Tests of what happens inside accepted blocks.)"""

    def __init__(self, target, prompts, answers):
        self.lines = [prompt + answer for prompt, answer in zip(prompts, answers)]
        self.vocab_size = target.vocab_size

    def expand(self, frontier):
        step = frontier.step
        logits = torch.full((*frontier.tokens.shape, self.vocab_size), -20.0, dtype=torch.float64)
        for b in range(logits.shape[0]):
            n = int(step.length[b]) + 1
            for w in range(logits.shape[1]):
                known = step.tokens[b, :n].tolist() + [t for t in frontier.path[b, w].tolist() if t >= 0]
                for line in self.lines:
                    if line[: len(known)] == known and len(line) > len(known):
                        logits[b, w, line[len(known)]] = 0.0
        return logits


def test_perfect_drafts_emit_depth_plus_one(target, prompts, expected):
    policy = trees()["chain"]
    turns = decode(target, prompts, drafter=Oracle(target, prompts, expected), policy=policy)
    for turn, answer in zip(turns, expected):
        assert turn.output_ids == answer
        full = [step["emitted"] for step in turn.steps[:-1]]
        assert full == [policy.depth + 1] * len(full)


@pytest.mark.parametrize("budget", range(1, 12))
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_budget_cuts_inside_accepted_blocks(target, prompts, expected, budget, tree):
    oracle = Oracle(target, prompts, expected)
    for turn, answer in zip(
        decode(target, prompts, drafter=oracle, policy=trees()[tree], budget=budget, batch=2), expected
    ):
        assert turn.output_ids == answer[:budget]
        assert turn.finish == "length"
        assert 1 + sum(step["emitted"] for step in turn.steps) == budget


def test_eos_cuts_inside_accepted_blocks(target, prompts, expected, monkeypatch):
    """Make every token of the answers the end in turn: the oracle's drafts then run past it."""
    for place in range(1, 10):
        eos = expected[0][place]
        monkeypatch.setattr(target, "eos", (eos,))
        oracle = Oracle(target, prompts, expected)
        for turn, answer in zip(decode(target, prompts, drafter=oracle, policy=trees()["dynamic"], batch=3), expected):
            cut = answer[: answer.index(eos) + 1] if eos in answer else answer
            assert turn.output_ids == cut
            assert turn.finish == ("eos" if eos in answer else "length")
            assert 1 + sum(step["emitted"] for step in turn.steps) == len(cut)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_stop_strings_cut_inside_accepted_blocks(target, prompts, expected, width):
    for place in range(0, 12):
        stop = target.text(expected[2][place : place + width])
        if not stop or "\ufffd" in stop:
            continue
        oracle = Oracle(target, prompts, expected)
        (turn,) = decode(target, prompts[2:3], drafter=oracle, policy=trees()["chain"], stop=(stop,))
        whole = target.text(expected[2])
        assert turn.finish == "stop"
        assert turn.text == whole[: whole.index(stop)]
        before = next(n for n in range(1, 99) if stop in target.text(expected[2][:n]))
        assert turn.output_ids == expected[2][:before]
        assert 1 + sum(step["emitted"] for step in turn.steps) == before


@pytest.mark.parametrize("draw", [None, "topk", "without_replacement", pytest.param("iid", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_tokens_do_not_depend_on_the_batch(target, draft_folder, prompts, name, draw):
    drafter = drafters(target, draft_folder)[name]
    common = {"drafter": drafter, "sampler": Sampler(temperature=0.9, top_p=0.95), "budget": 12}
    fixed = {name: policy for name, policy in trees(0.9, draw).items() if name != "auto"}  # all rows shape that one
    for policy in fixed.values():
        alone = decode(target, prompts, policy=policy, **common)
        together = decode(target, prompts, policy=policy, batch=3, **common)
        assert [turn.output_ids for turn in alone] == [turn.output_ids for turn in together]


def test_seed_and_question_change_the_sample(target, draft_folder, prompts):
    def sample(seed, ids):
        policy = trees(1.0)["chain"]
        return decode(
            target, ids, drafter=SmallLM(target, layers=1), policy=policy, sampler=Sampler(temperature=1.0), seed=seed
        )

    first = [turn.output_ids for turn in sample(0, [prompts[0]] * 3)]
    assert first == [turn.output_ids for turn in sample(0, [prompts[0]] * 3)]
    assert first != [turn.output_ids for turn in sample(1, [prompts[0]] * 3)]
    assert first[0] != first[1] != first[2]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("tree", TREES)
def test_penalties_are_exact_on_trees(target, draft_folder, prompts, name, tree):
    """With a repetition penalty p depends on each node's own path; plain decoding is the reference."""
    sampler = Sampler(repetition_penalty=1.3, logit_bias={97: 2.0, 5: -3.0})
    parts = drafters(target, draft_folder)
    plain = decode(target, prompts, drafter=parts["none"], policy=trees()["chain"], sampler=sampler)
    assert [t.output_ids for t in plain] != [naive_greedy(target, prompt, 24) for prompt in prompts]
    turns = decode(target, prompts, drafter=parts[name], policy=trees()[tree], sampler=sampler, batch=2)
    assert [turn.output_ids for turn in turns] == [turn.output_ids for turn in plain]


def test_nan_logits_fail_loudly(target, prompts, monkeypatch):
    broken = target.forward

    def forward(step, tree, taps):
        output = broken(step, tree, taps)
        output.logits[:, :, 3] = torch.nan
        return output

    monkeypatch.setattr(target, "forward", forward)
    common = {"drafter": SmallLM(target, layers=1), "policy": trees()["dynamic"]}
    for temperature, verifier in ((0.0, Rejection()), (1.0, Rejection()), (0.0, Greedy()), (1.0, TargetOnly())):
        with pytest.raises(UserError, match="NaN"):
            decode(target, prompts, verifier=verifier, sampler=Sampler(temperature=temperature), **common)


def test_nothing_matches_costs_a_plain_step(target):
    """N-gram lookup without a match verifies one node, the root."""
    from specresearch.drafters.ngram import NGram

    lookup = NGram(target, max_n=3, min_n=3, order="recency", backoff=0.001)
    (turn,) = decode(target, [[1, 2, 3]], drafter=lookup, policy=trees()["dynamic"], budget=2)
    assert [len(step["tokens"]) for step in turn.steps] == [1]


@pytest.mark.parametrize("slots", [3, 40])
@pytest.mark.parametrize("name", ["small_lm", "early_exit"])
def test_steps_in_which_nobody_asked_leave_no_gap(target, draft_folder, prompts, expected, name, slots):
    """A draft model that was left alone for some steps proposes what it would have proposed anyway."""

    class Moody(Chain):
        turn = 0

        def grow(self, step, ask):
            self.turn += 1
            return super().grow(step, ask) if self.turn % 9 == 0 else Tree.of_root(step)

        @property
        def asked(self):
            return slots

    def proposals(policy):
        """Drafted tokens by question and number of tokens known."""
        turns = decode(target, prompts, drafter=drafters(target, draft_folder)[name], policy=policy, batch=2)
        assert [turn.output_ids for turn in turns] == expected
        found = {}
        for turn in turns:
            known = 1
            for step in turn.steps:
                if len(step["tokens"]) > 1:
                    found[turn.job.id, known] = step["tokens"]
                known += step["emitted"]
        return found

    always, moody = proposals(Chain(depth=2, temperature=0)), proposals(Moody(depth=2, temperature=0))
    both = always.keys() & moody.keys()
    assert len(both) >= 3 and all(always[key] == moody[key] for key in both)
