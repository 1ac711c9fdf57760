"""The EAGLE drafter in the loop: every answer that it gives equals a from-scratch forward over that node's path."""

import random
from dataclasses import replace

import pytest
import straight
import torch
from conftest import PROMPTS
from helpers import decode, naive_greedy, trees
from tiny_heads import eagle_head

from specresearch.drafters import eagle as drafter_file
from specresearch.drafters.eagle import Eagle
from specresearch.models import tiny
from specresearch.models.checkpoints import save_head
from specresearch.sampling import Sampler
from specresearch.trees.static import StaticTree
from specresearch.types import Tree

HEADS = {
    "eagle1": {"version": 1},
    "eagle3": {},
    "switches": {"norm_output": True, "norm_before_residual": True, "fc_norm": True, "rope_theta": 30.0},
    "window": {"window": 7},
}
TREES = ["chain", "static", "best_first"]


@pytest.fixture(scope="module")
def deep():
    """A target of four blocks, so that there are three streams below its last one."""
    return tiny.load(dtype="float64", device="cpu", layers=4)


@pytest.fixture(scope="module")
def prompts(deep):
    return [deep.chat([{"role": "user", "content": text}]) for text in PROMPTS]


@pytest.fixture(scope="module")
def answers(deep, prompts):
    return [naive_greedy(deep, prompt, 14) for prompt in prompts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, fields in HEADS.items():
        made[name] = str(tmp_path_factory.mktemp(name))
        save_head(eagle_head(**fields), made[name])
    return made


@torch.no_grad()
def right_features(target, taps, tokens):
    """The target's features of all tokens by its own forward -> [len(tokens), F]"""
    hidden = target.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[-1 if tap == "norm" else tap][0] for tap in taps], -1)


class Watched(Eagle):
    """Records what it is asked and answers, and is now and then told the truth, so that some drafts are accepted."""

    def knows(self, prompts, answers):
        self.lines, self.seen = [p + a for p, a in zip(prompts, answers)], []
        return self

    def expand(self, frontier):
        logits = super().expand(frontier)
        step, told = frontier.step, logits.clone()
        for b in range(logits.shape[0]):
            if not step.live[b]:
                continue
            known = step.tokens[b, : int(step.length[b]) + 1].tolist()
            for w in range(logits.shape[1]):
                path = [t for t in frontier.path[b, w].tolist() if t >= 0]
                self.seen.append((known, path, logits[b, w]))
                whole = known + path
                for line in self.lines:
                    if line[: len(whole)] == whole and len(line) > len(whole) and sum(whole) % 4:
                        told[b, w, line[len(whole)]] = 30.0
        return told


def check(drafter, target):
    """Recorded answers, picked at random, against the straight line: from nothing but the tokens of the whole path."""
    roots, nodes = ([seen for seen in drafter.seen if bool(seen[1]) is deep] for deep in (False, True))
    picked = random.sample(roots, 4) + random.sample(nodes, 10)
    head, known_features = drafter.head, {}
    weights = {n.replace("vocabulary.", ""): t for n, t in head.state_dict().items()}
    for known, path, logits in picked:
        if tuple(known) not in known_features:
            known_features[tuple(known)] = right_features(target, head.config.taps, known[:-1])
        answer = straight.eagle(weights, head.config, known, known_features[tuple(known)], path)[-1]
        kept = head.vocabulary.kept
        torch.testing.assert_close(logits[kept], answer, rtol=0, atol=1e-8)
        assert torch.isinf(logits).sum() == logits.shape[0] - kept.shape[0]


def watched(target, folder, prompts, answers):
    return Watched(target, ckpt=folder).knows(prompts, answers)


@pytest.mark.parametrize(
    ("name", "tree", "batch"),
    [*[(name, "dynamic", 3) for name in HEADS], *[("eagle3", tree, 2) for tree in TREES], ("eagle1", "chain", 1)],
)
def test_answers_equal_a_from_scratch_forward(deep, folders, prompts, answers, name, tree, batch):
    drafter = watched(deep, folders[name], prompts, answers)
    turns = decode(deep, prompts, drafter=drafter, policy=trees()[tree], batch=batch, budget=14)
    assert [turn.output_ids for turn in turns] == answers
    emitted = [step["emitted"] for turn in turns for step in turn.steps]
    assert 1 in emitted and max(emitted) >= 3, "partial acceptance is what is tested here"
    check(drafter, deep)


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_without_help_the_output_is_the_targets_all_the_same(deep, folders, prompts, answers, name):
    for policy in (trees()["chain"], trees()["dynamic"]):
        turns = decode(deep, prompts, drafter=Eagle(deep, ckpt=folders[name]), policy=policy, batch=2, budget=14)
        assert [turn.output_ids for turn in turns] == answers


def test_sampled_tokens_do_not_depend_on_the_batch(deep, folders, prompts):
    common = {"drafter": Eagle(deep, ckpt=folders["eagle3"]), "sampler": Sampler(temperature=0.9), "budget": 8}
    for policy in [trees(0.9, "iid")[name] for name in ("chain", "static")]:
        alone = decode(deep, prompts, policy=policy, **common)
        together = decode(deep, prompts, policy=policy, batch=3, **common)
        assert [turn.output_ids for turn in alone] == [turn.output_ids for turn in together]


def test_a_head_may_change_between_answers(folders):
    """On the CPU it drafts from a packing of its weights."""
    target = tiny.load(dtype="float32", device="cpu", layers=4)
    drafter = Eagle(target, ckpt=folders["eagle3"])
    drafter.reserve(1, 20, 8)
    packed = drafter.forward.block
    for change in (None, drafter.head.midlayer.mlp.down_proj.weight, drafter.head.fc.weight):
        if change is not None:
            change.data = 2 * change.data
        features = torch.zeros(1, 3, 3 * target.model.config.hidden_size)
        drafter.extend([0], torch.tensor([[1, 2, 3]]), torch.tensor([3]), features)
        assert (drafter.forward.block is packed) == (change is None)
        packed = drafter.forward.block


def test_long_prompts_are_fed_in_chunks(deep, folders, prompts, answers, monkeypatch):
    monkeypatch.setattr(drafter_file, "PREFILL_CHUNK", 5)
    for name in ("eagle3", "window"):
        drafter = watched(deep, folders[name], prompts, answers)
        decode(deep, prompts, drafter=drafter, policy=trees()["dynamic"], batch=2, budget=8)
        check(drafter, deep)


def test_a_prompt_of_one_token_and_refilled_rows(deep, folders):
    short = [[65], [66, 67], [1], [2, 3, 4], [65, 66]]
    answers = [naive_greedy(deep, prompt, 14) for prompt in short]
    drafter = watched(deep, folders["eagle3"], short, answers)
    turns = decode(deep, short, drafter=drafter, policy=trees()["dynamic"], batch=2, budget=14)
    assert [turn.output_ids for turn in turns] == answers
    check(drafter, deep)


@pytest.mark.parametrize(("most", "reads"), [(64, True), (64, False), (3, True), (1, True)])
def test_steps_in_which_nobody_asked_leave_no_gap(deep, folders, prompts, answers, monkeypatch, most, reads):
    """What they made possible waits, up to so many entries, and is fed with the next question or before."""
    monkeypatch.setattr(drafter_file, "MOST_DUE", most)

    class Moody(StaticTree):
        """Proposes nothing in two of three steps."""

        turn = 0

        def grow(self, step, ask):
            self.turn += 1
            return super().grow(step, ask) if self.turn % 3 == 0 else Tree.of_root(step)

    drafter = watched(deep, folders["eagle3"], prompts, answers)
    monkeypatch.setattr(drafter_file, "may_ask", lambda device: reads)
    turns = decode(deep, prompts, drafter=drafter, policy=Moody(widths=[2, 2], temperature=0), batch=2, budget=14)
    assert [turn.output_ids for turn in turns] == answers
    check(drafter, deep)


def test_without_device_reads_the_widest_feed_is_right_too(deep, folders, prompts, answers, monkeypatch):
    monkeypatch.setattr(drafter_file, "may_ask", lambda device: False)
    drafter = watched(deep, folders["eagle3"], prompts, answers)
    turns = decode(deep, prompts, drafter=drafter, policy=trees()["dynamic"], batch=2, budget=10)
    assert [turn.output_ids for turn in turns] == [answer[:10] for answer in answers]
    check(drafter, deep)


class LatePositions(Watched):
    def _run(self, tokens, state, position, *rest, **kwargs):
        return super()._run(tokens, state, position + bool(kwargs.get("start")), *rest, **kwargs)


class LeakedSiblings(Watched):
    def _run(self, tokens, state, position, length, mask, *rest, **kwargs):
        return super()._run(tokens, state, position, length, torch.ones_like(mask), *rest, **kwargs)


class StaleEntries(Watched):
    """Feeds the last entry only, so that those below it keep what draft nodes left there."""

    def _root(self, step):
        last = (self.due - 1)[:, None, None].expand(-1, 1, self.features.shape[-1])
        self.features, self.due = self.features.gather(1, last), torch.ones_like(self.due)
        return super()._root(step)


class UnshiftedTokens(Watched):
    def _root(self, step):
        return super()._root(replace(step, tokens=step.tokens.roll(1, 1)))


@pytest.mark.parametrize("fault", [LatePositions, LeakedSiblings, StaleEntries, UnshiftedTokens])
def test_the_check_sees_planted_faults(deep, folders, prompts, answers, fault):
    """And the output stays right: a wrong cache of the drafter costs acceptance, never exactness."""
    drafter = fault(deep, ckpt=folders["eagle3"]).knows(prompts, answers)
    turns = decode(deep, prompts, drafter=drafter, policy=trees()["dynamic"], batch=2, budget=10)
    assert [turn.output_ids for turn in turns] == [answer[:10] for answer in answers]
    with pytest.raises(AssertionError, match="close"):
        check(drafter, deep)
