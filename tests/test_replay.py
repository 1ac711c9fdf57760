"""What if the tree had been another: a replay says what a run then does, step by step, and where it cannot know."""

import json
from pathlib import Path

import pytest
import torch
from helpers import decode, drafters
from tiny_heads import eagle_head, medusa_heads

from specresearch import cli, replay
from specresearch.decode import Decoder, Job, Parts
from specresearch.drafters.eagle import Eagle
from specresearch.drafters.medusa import Medusa
from specresearch.models.checkpoints import save_head
from specresearch.recording import Recorder
from specresearch.sampling import Sampler
from specresearch.trees.best_first import BestFirstTree
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.static import Chain, StaticTree
from specresearch.types import UserError
from specresearch.verifiers.rejection import Rejection
from specresearch.whatif import grow
from specresearch.whatif.book import of_dense, of_trace
from specresearch.whatif.grow import Reader, lengths
from specresearch.whatif.walk import walk

TEXTS = ["abcabcabcabc the cat", "one two three one two three one two", "Hello, who are you? Hello, who"]
BUDGET = 20
HEAT = {"temperature": 0.0}
LARGE = {
    "dynamic": DynamicTree(depth=4, topk=3, size=31, **HEAT),
    "chain": Chain(depth=4, **HEAT),
    "static": StaticTree(widths=[3, 2, 1], **HEAT),
    "best_first": BestFirstTree(depth=3, topk=3, size=9, **HEAT),
}
SMALLER = {
    "dynamic": [
        DynamicTree(depth=d, topk=k, size=n, **HEAT)
        for d, k, n in [(4, 3, 31), (4, 3, 8), (4, 2, 8), (4, 1, 5), (3, 3, 12), (3, 2, 5), (2, 2, 3), (1, 3, 4)]
    ]
    + [Chain(depth=3, **HEAT)],
    "chain": [Chain(depth=d, **HEAT) for d in (1, 2, 4)],
    "static": [StaticTree(widths=w, **HEAT) for w in ([3, 2, 1], [2, 2], [1, 1, 1])]
    + [StaticTree(parents=[-1, 0, 0, 1, 1, 3], **HEAT)],
    "best_first": [BestFirstTree(depth=d, topk=k, size=n, **HEAT) for d, k, n in [(3, 3, 9), (2, 3, 6), (3, 1, 4), (3, 2, 5)]],
}


@pytest.fixture(scope="module")
def all_drafters(target, draft_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    save_head(eagle_head(taps=(1, 1, 2)), folder / "eagle")
    save_head(medusa_heads(), folder / "medusa")
    own = drafters(target, draft_folder)
    del own["none"]
    return own | {
        "eagle": Eagle(target, ckpt=str(folder / "eagle"), dtype="float64"),
        "medusa": Medusa(target, ckpt=str(folder / "medusa"), dtype="float64"),
    }


def record(target, drafter, policy, budget=BUDGET, sampler=None):
    """Lines of a dense trace, as a run writes them."""
    recorder = Recorder(policy)
    prompts = [target.chat([{"role": "user", "content": text}]) for text in TEXTS]
    capacity = max(map(len, prompts)) + budget
    parts = Parts(target, drafter, recorder, Rejection(), sampler or Sampler())
    target.reserve(1, capacity, 64)
    drafter.reserve(1, capacity, recorder.asked)
    decoder = Decoder(parts, batch=1, capacity=capacity, seed=0, decode=target.text, stop=())
    lines, drafts = [], []
    for emission in decoder.run(Job(i, "test", 0, ids, budget) for i, ids in enumerate(prompts)):
        if emission.turn.steps:
            drafts.append(recorder.take())
        if emission.done:
            lines.append(json.loads(json.dumps(emission.turn.line() | {"drafts": drafts})))
            drafts = []
    return prompts, lines


def walked(found):
    place, emitted = 0, []
    while place < found.sure.shape[0]:
        emitted.append(min(int(found.sure[place]), found.sure.shape[0] - place))
        place += emitted[-1]
    return emitted


def nodes(tokens, parent):
    """A tree as a set of paths."""
    paths = {0: ()}
    for node, (token, above) in enumerate(zip(tokens, parent)):
        if node and token >= 0:
            paths[node] = (*paths[above], token)
    return set(paths.values())


def replayed_trees(policy, book, names):
    tree = policy.grow(grow._step(book.places), Reader(book, policy.width).answer)
    for place, own in enumerate(names):
        valid = tree.valid[place].tolist()
        tokens = [own[t] if ok and n else -1 for n, (t, ok) in enumerate(zip(tree.tokens[place].tolist(), valid))]
        yield nodes(tokens, tree.parent[place].tolist())


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("name", ["ngram", "small_lm", "early_exit", "eagle", "medusa"])
def test_a_dense_trace_tells_every_smaller_run_step_by_step(target, all_drafters, name, kind):
    drafter, large = all_drafters[name], LARGE[kind]
    prompts, lines = record(target, drafter, large)
    longest = 1
    for policy in SMALLER[kind]:
        turns = decode(target, prompts, drafter=drafter, policy=policy, budget=BUDGET)
        for line, turn in zip(lines, turns):
            assert line["output_ids"] == turn.output_ids
            book = of_dense(line, large.width, policy.depth)
            found = lengths(policy, book)
            assert found.exact.all()
            assert walked(found) == [step["emitted"] for step in turn.steps]
            named = [sorted({t for kids in d.get("children", ()) for t in kids}) for d in line["drafts"]]
            trees, at = list(replayed_trees(policy, book, named)), 0
            for step in turn.steps:  # however the loop came there, the drafter says the same
                assert trees[at] == nodes(step["tokens"], step["parent"])
                at += step["emitted"]
            longest = max(longest, *walked(found))
    assert longest > 1 or name in ("eagle", "medusa")  # random heads are seldom right
