"""Trees whose shape is chosen by what it brings per second: deep for a good drafter, none for one that is always wrong."""

import pytest
import torch
from conftest import PROMPTS
from helpers import decode, naive_greedy

from specresearch.lossless.exact import EXACT, certify
from specresearch.trees.auto import AutoTree
from specresearch.types import Drafter, UserError
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.target_only import TargetOnly

COSTS = {"cost": {1: 1.0, 16: 1.6}, "draft_cost": 0.12}
FREE = {"cost": {1: 1.0}, "draft_cost": 0.0}  # whatever may help is done


def auto(**given):
    return AutoTree(**{"depth": 6, "topk": 2, "size": 12, "temperature": 0.0, **COSTS} | given)


class Sure(Drafter):
    """Proposes, with certainty, what plain decoding of the prompt would give, or with `shift` something else."""

    def __init__(self, answers, vocab, shift=0):
        self.answers, self.vocab, self.shift, self.asked = answers, vocab, shift, []

    def expand(self, frontier):
        step = frontier.step
        logits = torch.full((*frontier.tokens.shape, self.vocab), -20.0)
        self.asked.append((int(step.length.max()), frontier.start))
        for row, known in enumerate(step.tokens.tolist()):
            for node, path in enumerate(frontier.path[row].tolist()):
                at = int(step.length[row]) + 1 + sum(token >= 0 for token in path)
                line = next(
                    a for a in self.answers if a[: int(step.length[row]) + 1] == known[: int(step.length[row]) + 1]
                )
                if at < len(line):
                    logits[row, node, (line[at] + self.shift) % self.vocab] = 0.0
        return logits


@pytest.fixture(scope="module")
def prompts(target):
    return [target.chat([{"role": "user", "content": text}]) for text in PROMPTS]


@pytest.fixture(scope="module")
def lines(target, prompts):
    return [prompt + naive_greedy(target, prompt, 60) for prompt in prompts[:2]]


def lengths(turns):
    return [step["emitted"] for turn in turns for step in turn.steps]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_good_drafter_gets_deep_trees(target, prompts, lines, batch):
    drafter = Sure(lines, target.vocab_size)
    turns = decode(target, prompts[:2], drafter=drafter, policy=auto(), batch=batch, budget=60)
    assert [turn.job.prompt_ids + turn.output_ids for turn in turns] == lines
    assert sum(n == 7 for n in lengths(turns)) > 0.8 * len(lengths(turns)), "all six levels, nearly always"


@pytest.mark.parametrize("batch", [1, 2])
def test_one_that_is_always_wrong_is_asked_seldom_and_again(target, prompts, lines, batch):
    """The modelled time, in passes over one token, stays within 3% of plain decoding once the drafter is known."""
    drafter, policy = Sure(lines, target.vocab_size, shift=1), auto()
    turns = decode(target, prompts[:2], drafter=drafter, policy=policy, batch=batch, budget=60)
    assert [turn.job.prompt_ids + turn.output_ids for turn in turns] == lines
    drafter.asked.clear()
    turns = decode(target, prompts[:2] * 4, drafter=drafter, policy=policy, batch=batch, budget=60)
    steps = [step for turn in turns for step in turn.steps]
    tried = [step for step in steps if len(step["tokens"]) > 1]
    extra = sum(policy._pass(len(step["tokens"])) - 1 for step in steps) + len(drafter.asked) * 0.12
    assert len(tried) > 0, "it may have become better, so it is tried again"
    assert extra < 0.03 * len(steps), f"{len(tried)} of {len(steps)} steps"


def test_a_drafter_that_mends_its_ways_is_noticed(target, prompts, lines):
    policy = auto()
    decode(target, prompts[:2] * 2, drafter=Sure(lines, target.vocab_size, shift=1), policy=policy, budget=60)
    turns = decode(target, prompts[:2] * 4, drafter=Sure(lines, target.vocab_size), policy=policy, budget=60)
    late = lengths(turns)[-10:]
    assert sum(late) / len(late) > 5


def test_dear_nodes_make_small_trees(target, prompts, lines):
    sizes = []
    for dear in (0.01, 2.0):
        policy = auto(cost={1: 1.0, 2: 1.0 + dear})
        turns = decode(target, prompts[:1], drafter=Sure(lines, target.vocab_size), policy=policy, budget=60)
        sizes.append(max(len(step["tokens"]) for turn in turns for step in turn.steps))
    assert sizes[0] >= 7 and sizes[1] == 1, "a node that costs two passes is never worth its token"


def test_costs_are_measured_unless_given(target, prompts, lines):
    asked = []

    def seconds(nodes):
        asked.append(nodes)
        return 1.0 + nodes / 100

    policy = auto(cost=None, draft_cost=None, size=8)
    policy.prepare(seconds)
    assert sorted(set(asked)) == [1, 2, 4, 8] and policy._pass(8) == pytest.approx(1.08 / 1.01)
    assert policy._pass(16) == pytest.approx(1.16 / 1.01), "straight on beyond what was measured"
    decode(target, prompts[:1], drafter=Sure(lines, target.vocab_size), policy=policy, budget=20)
    assert 0 < policy._level() < 1
    auto().prepare(lambda _: pytest.fail("both costs were given"))


@pytest.mark.parametrize("draw", ["topk", "iid", "without_replacement"])
@pytest.mark.parametrize("rule", [Rejection(), TargetOnly()])
def test_exact_at_every_draw(draw, rule):
    policy = auto(depth=2, topk=2, size=4, temperature=1.0, draw=draw, **FREE)
    found = certify(rule, policy, f"auto {draw}")
    assert found.worst <= EXACT and policy.plan.levels == 2, "and a tree was grown"


def test_drawn_children_that_counted_as_drawn_would_be_biased():
    """The planted fault: it drops nodes after they were revealed, so their law must be a point's."""

    class Drawn(AutoTree):
        law, growth = "iid", "predictable"

        def grow(self, step, ask):
            self.q = None

            def keeping(frontier):
                score, self.q = ask(frontier)
                return score, self.q

            tree = super().grow(step, keeping)
            wide = self.q.expand(-1, tree.tokens.shape[1], -1)
            return type(tree)(
                *(getattr(tree, f) for f in ("tokens", "parent", "depth", "valid", "score")),
                "iid",
                "predictable",
                tree.levels,
                wide,
            )

    policy = Drawn(depth=1, topk=3, size=2, temperature=1.0, draw="iid", **FREE)
    assert certify(Rejection(), policy, "drawn").worst > 1e-3


def test_nobody_asked_is_plain_decoding(target, prompts, lines):
    """A drafter may decline by itself; what was planned before does not count then."""
    policy = auto()
    decode(target, prompts[:1], drafter=Sure(lines, target.vocab_size), policy=policy, budget=20)
    before = policy.evidence.sums
    turns = decode(target, prompts[:1], drafter=Chainless(), policy=policy, budget=20)
    assert turns[0].job.prompt_ids + turns[0].output_ids == lines[0][: len(prompts[0]) + 20]
    assert all(now <= old for row, was in zip(policy.evidence.sums, before) for now, old in zip(row, was))


class Chainless(Drafter):
    law, growth = "point", "static"

    def propose(self, step, policy, ask):
        from specresearch.types import Tree

        return Tree.of_root(step)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cost": {8: 1.2}}, "tree.cost"),
        ({"cost": {1: -1}}, "tree.cost"),
        ({"cost": "free"}, "tree.cost"),
        ({"draft_cost": -1}, "tree.draft_cost"),
        ({"depth": 0}, "tree.depth"),
        ({"size": 4}, "tree.size=7"),
        ({"size": "auto"}, "use tree=auto"),
    ],
)
def test_impossible_settings_are_refused(given, says):
    with pytest.raises(UserError, match=says):
        auto(**given)
