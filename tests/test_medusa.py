"""The Medusa drafter in the loop, Medusa's published trees, and typical acceptance."""

import math

import pytest
import straight
import torch
from conftest import PROMPTS
from helpers import decode, naive_greedy, trees
from tiny_heads import medusa_heads

from specresearch.drafters.medusa import Medusa
from specresearch.fit import check_fit
from specresearch.models.checkpoints import save_head
from specresearch.rng import CounterRng
from specresearch.sampling import Sampler
from specresearch.trees.presets import PRESETS
from specresearch.trees.static import StaticTree
from specresearch.types import Drafter, Tree, UserError
from specresearch.verifiers.typical import Typical

HEADS = {"own": {}, "tied": {"tied": True, "from_target": ("lm_head.weight",)}, "reduced": {"draft_vocab_size": 100}}


@pytest.fixture(scope="module")
def prompts(target):
    return [target.chat([{"role": "user", "content": text}]) for text in PROMPTS]


@pytest.fixture(scope="module")
def answers(target, prompts):
    return [naive_greedy(target, prompt, 14) for prompt in prompts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, fields in HEADS.items():
        made[name] = str(tmp_path_factory.mktemp(name))
        save_head(medusa_heads(**fields), made[name])
    return made


class Watched(Medusa):
    """Records its answers, and is now and then told the truth, so that some drafts are accepted."""

    def knows(self, prompts, answers):
        self.lines, self.seen = [p + a for p, a in zip(prompts, answers)], []
        return self

    def expand(self, frontier):
        logits, step = super().expand(frontier), frontier.step
        told = logits.clone()
        for b in range(logits.shape[0]):
            known = step.tokens[b, : int(step.length[b]) + 1].tolist()
            for w in range(logits.shape[1] if step.live[b] else 0):
                path = [t for t in frontier.path[b, w].tolist() if t >= 0]
                self.seen.append((known, len(path), logits[b, w]))
                whole = known + path
                for line in self.lines:
                    if line[: len(whole)] == whole and len(line) > len(whole) and sum(whole) % 4:
                        told[b, w, line[len(whole)]] = 30.0
        return told


@torch.no_grad()
def check(drafter, target):
    """The feature is that of the last token before the root, and head `depth` answers; nothing below the last head."""
    heads, picked = drafter.heads, drafter.seen[:: max(1, len(drafter.seen) // 40)]
    kept, depths = heads.vocabulary.kept, set()
    for known, depth, logits in picked:
        hidden = target.model(input_ids=torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        expected = straight.medusa(heads.state_dict(), 3, 1, hidden[-1][0, -1])
        if depth < 3:
            torch.testing.assert_close(logits[kept], expected[depth], rtol=0, atol=1e-8)
        assert torch.isinf(logits).sum() == (logits.shape[0] - len(kept) if depth < 3 else logits.shape[0])
        depths.add(min(depth, 3))
    assert depths == {0, 1, 2, 3}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("batch", [1, 3])
def test_answers_equal_a_from_scratch_forward(target, folders, prompts, answers, name, batch):
    drafter = Watched(target, ckpt=folders[name]).knows(prompts, answers)
    policy = StaticTree(widths=[3, 2, 1, 1, 1], temperature=0)
    turns = decode(target, prompts, drafter=drafter, policy=policy, batch=batch, budget=14)
    assert [turn.output_ids for turn in turns] == answers
    emitted = [step["emitted"] for turn in turns for step in turn.steps]
    assert 1 in emitted and max(emitted) >= 3
    check(drafter, target)


def test_the_check_sees_the_feature_of_another_token(target, folders, prompts, answers):
    class Late(Watched):
        def commit(self, step, tree, verdict, features):
            super().commit(step, tree, verdict, features.roll(1, 1))

    drafter = Late(target, ckpt=folders["own"]).knows(prompts, answers)
    policy = StaticTree(widths=[3, 2, 1, 1, 1], temperature=0)
    turns = decode(target, prompts, drafter=drafter, policy=policy, batch=2, budget=14)
    assert [turn.output_ids for turn in turns] == answers
    with pytest.raises(AssertionError, match="close"):
        check(drafter, target)


@pytest.mark.parametrize("tree", ["chain", "dynamic", "best_first"])
def test_without_help_the_output_is_the_targets_all_the_same(target, folders, prompts, answers, tree):
    drafter = Medusa(target, ckpt=folders["own"])
    turns = decode(target, prompts, drafter=drafter, policy=trees()[tree], batch=2, budget=14)
    assert [turn.output_ids for turn in turns] == answers


# -- published trees -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("eagle1", [4, 8, 8, 3, 2]),
        ("medusa", [10, 28, 23, 2]),
        ("medusa_vicuna_7b", [10, 23, 23, 7]),
        ("medusa_vicuna_13b", [10, 19, 25, 9]),
        ("medusa_vicuna_33b", [10, 24, 24, 5]),
        ("medusa_zephyr", [10, 27, 23, 3]),
    ],
)
def test_published_trees_have_their_sizes(name, levels):
    policy = StaticTree(preset=name, temperature=0)
    assert [policy.node_depth.count(d) for d in range(1, policy.depth + 1)] == levels
    assert policy.size == 1 + sum(levels)
    assert policy.width == levels[0] <= 10


def test_published_trees_could_have_been_grown_greedily():
    """A node is there only if its better sibling is, and has no more children than that one: paths multiply."""
    for name, preset in PRESETS.items():
        count = {n.strip("-"): int(c) for n, c in (item.split(":") for item in preset.split())}
        for node in count if name != "binary" else ():
            if node and node[-1] != "0":
                better = node[:-1] + str(int(node[-1]) - 1)
                assert count.get(better, 0) >= count[node], (name, node)


def test_medusa_tree_in_the_loop(target, folders, prompts, answers):
    drafter = Watched(target, ckpt=folders["own"]).knows(prompts, answers)
    policy = StaticTree(preset="medusa", temperature=0)
    turns = decode(target, prompts[:2], drafter=drafter, policy=policy, batch=2, budget=14)
    assert [turn.output_ids for turn in turns] == answers[:2]
    assert max(step["emitted"] for turn in turns for step in turn.steps) >= 3


# -- typical acceptance --------------------------------------------------------------------------------------------------


class Law:
    def __init__(self, law):
        self.law = law

    def all(self):
        return self.law


def tree_of(parent, tokens):
    parent, tokens = torch.tensor([parent]), torch.tensor([tokens])
    depth = torch.zeros_like(parent)
    for i in range(1, parent.shape[1]):
        depth[0, i] = depth[0, parent[0, i]] + 1
    valid = tokens >= 0
    return Tree(tokens.clamp(min=0), parent, depth, valid, valid.double(), "point", "static", int(depth.max()))


def typical_by_hand(tree, law, threshold, alpha):
    """The rule of the paper, branch by branch -> accepted nodes below the root."""
    best: tuple = ((0, 0.0), [])
    for leaf in range(tree.tokens.shape[1]):
        line, node = [], leaf
        while node > 0:
            line.insert(0, node)
            node = int(tree.parent[0, node])
        total, above = 0.0, 0
        for node in line:
            p = law[above]
            entropy = -sum(float(x) * math.log(float(x)) for x in p if x > 0)
            mass = float(p[tree.tokens[0, node]]) if tree.valid[0, node] else 0.0
            if not mass > min(threshold, alpha * math.exp(-entropy)):
                break
            total, above = total + math.log(mass), node
        else:
            if (len(line), total) > best[0]:
                best = ((len(line), total), line)
    return best[1]


def test_typical_acceptance_equals_the_rule_by_hand():
    noise, lengths = torch.Generator().manual_seed(0), set()
    for trial in range(60):
        parent = [-1] + [int(torch.randint(i, (), generator=noise)) for i in range(1, 10)]
        tokens = torch.randint(-1 if trial % 2 else 0, 6, (10,), generator=noise).tolist()
        tokens[0] = 3
        tree = tree_of(parent, tokens)
        law = (2 * torch.randn(10, 6, generator=noise, dtype=torch.float64)).softmax(-1)
        rng = CounterRng(torch.tensor([trial]), torch.tensor([1]))
        verdict = Typical(posterior_threshold=0.2, posterior_alpha=0.5).verify(tree, Law(law[None]), rng)
        expected = [0, *typical_by_hand(tree, law, 0.2, 0.5)]
        assert verdict.path[0].tolist() == expected + [-1] * (tree.levels + 1 - len(expected))
        assert int(verdict.length) == len(expected)
        assert float(law[expected[-1], int(verdict.next_token)]) > 0
        lengths.add(len(expected))
    assert {1, 2, 3} <= lengths


def test_of_two_plausible_branches_the_likelier_is_kept():
    tree = tree_of([-1, 0, 0], [0, 1, 2])
    law = torch.tensor([[[0.2, 0.35, 0.45]] * 3], dtype=torch.float64)
    rng = CounterRng(torch.tensor([0]), torch.tensor([1]))
    assert Typical().verify(tree, Law(law), rng).path.tolist() == [[0, 2]]


def test_typical_acceptance_is_exact_at_temperature_0_and_lossy_above(target, folders, prompts, answers):
    drafter = Watched(target, ckpt=folders["own"]).knows(prompts, answers)
    common = {"drafter": drafter, "policy": trees()["static"], "batch": 2, "budget": 14}
    turns = decode(target, prompts, verifier=Typical(), **common)
    assert [turn.output_ids for turn in turns] == answers
    turns = decode(target, prompts, verifier=Typical(), sampler=Sampler(temperature=1.0), **common)
    assert all(len(turn.output_ids) == 14 for turn in turns if turn.finish == "length")
    with pytest.raises(UserError, match="lossy=allow"):
        check_fit(Drafter(), trees()["static"], Typical(), 1.0, "refuse")
    check_fit(Drafter(), trees()["static"], Typical(), 1.0, "allow")


def test_nan_laws_fail_in_the_typical_rule_too():
    law = torch.full((1, 3, 4), torch.nan, dtype=torch.float64)
    rng = CounterRng(torch.tensor([0]), torch.tensor([1]))
    verdict = Typical().verify(tree_of([-1, 0, 0], [0, 1, 2]), Law(law), rng)
    assert (int(verdict.length), int(verdict.next_token)) == (1, -1)


@pytest.mark.parametrize("key", ["posterior_threshold", "posterior_alpha"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "x"])
def test_thresholds_outside_their_range_are_refused(key, value):
    with pytest.raises(UserError, match=key):
        Typical(**{key: value})
