"""What if the tree had been another: a replay says what a run then does, step by step, and where it cannot know."""

import json
import shutil
import sys
from dataclasses import replace

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
from specresearch.results import read_lines
from specresearch.sampling import Sampler
from specresearch.trees.best_first import BestFirstTree
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.static import Chain, StaticTree
from specresearch.verifiers.rejection import Rejection
from specresearch.whatif import grow
from specresearch.whatif.book import of_dense
from specresearch.whatif.grow import Lengths, Reader, lengths
from specresearch.whatif.price import by_size, target_prices
from specresearch.whatif.walk import walk

TEXTS = ["one two three one two three one two", "Hello, who are you? Hello, who"]
BUDGET = 12
HEAT = {"temperature": 0.0}
LARGE = {
    "dynamic": DynamicTree(depth=3, topk=3, size=22, **HEAT),
    "chain": Chain(depth=4, **HEAT),
    "static": StaticTree(widths=[3, 2, 1], **HEAT),
    "best_first": BestFirstTree(depth=3, topk=3, size=9, **HEAT),
}
SMALLER = {
    "dynamic": [DynamicTree(depth=d, topk=k, size=n, **HEAT) for d, k, n in [(3, 3, 8), (3, 2, 6), (2, 3, 6)]],
    "chain": [Chain(depth=d, **HEAT) for d in (2, 4)],
    "static": [StaticTree(widths=w, **HEAT) for w in ([2, 2],)] + [StaticTree(parents=[-1, 0, 0, 1, 1, 3], **HEAT)],
    "best_first": [BestFirstTree(depth=d, topk=k, size=n, **HEAT) for d, k, n in [(3, 3, 9), (2, 2, 5)]],
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


def agrees(target, prompts, lines, drafter, large, policy):
    """A real run does what the replay says: the same text, the same steps, the same tree at the start of each."""
    longest = 0
    for line, turn in zip(lines, decode(target, prompts, drafter=drafter, policy=policy, budget=BUDGET)):
        assert line["output_ids"] == turn.output_ids
        book = of_dense(line, large.width, policy.depth)
        found = lengths(policy, book)
        assert found.exact.all()
        assert walked(found) == [step["emitted"] for step in turn.steps]
        named = [[-1, *sorted({t for kids in d.get("children", ()) for t in kids})] for d in line["drafts"]]
        trees, at = list(replayed_trees(policy, book, named)), 0
        for step in turn.steps:  # however the loop came there, the drafter says the same
            assert trees[at] == nodes(step["tokens"], step["parent"])
            at += step["emitted"]
        longest = max(longest, *walked(found))
    return longest


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "dynamic") for name in ("ngram", "early_exit", "eagle", "medusa")),
        *(("small_lm", kind) for kind in LARGE),
    ],
)
def test_a_dense_trace_tells_every_smaller_run_step_by_step(target, all_drafters, name, kind):
    drafter, large = all_drafters[name], LARGE[kind]
    prompts, lines = record(target, drafter, large)
    longest = [agrees(target, prompts, lines, drafter, large, policy) for policy in SMALLER[kind]]
    assert max(longest) > 1 or name in ("eagle", "medusa")  # random heads are seldom right


# -- planted faults: each must make the comparison above fail ---------------------------------------------------------------


def late(follow):
    """The walk compares each token with the one after the next."""
    return lambda tree, book, reader: follow(tree, replace(book, after=book.after.roll(-1, 1)), reader)


def generous(follow):
    """One accepted draft too many is counted."""

    def wrong(tree, book, reader):
        count, opened = follow(tree, book, reader)
        return count + (count > 0).long(), opened

    return wrong


@pytest.mark.parametrize("fault", [late, generous])
def test_a_walk_that_is_off_by_one_is_found(target, all_drafters, fault, monkeypatch):
    prompts, lines = record(target, all_drafters["small_lm"], LARGE["chain"])
    monkeypatch.setattr(grow, "follow", fault(grow.follow))
    with pytest.raises(AssertionError):
        agrees(target, prompts, lines, all_drafters["small_lm"], LARGE["chain"], Chain(depth=3, **HEAT))


def drafted(children, logp):
    """What a drafter said at one place: {path: {token: log-probability}}"""
    paths = list(children)
    return {
        "parent": [paths.index(path[:-1]) if path else -1 for path in paths],
        "token": [path[-1] if path else -1 for path in paths],
        "children": [list(children[path]) for path in paths],
        "logp": [logp[path] for path in paths],
    }


# Token 1 is likelier than 2 at first, but what follows 2 is certain: a beam of two leaves 1's branch behind, a beam of one
# does not know of 2.
SAID = {(): [1, 2], (1,): [3, 4], (2,): [5, 6], (2, 5): [7, 8], (2, 6): [7, 8], (1, 3): [9, 8]}
LOGP = {
    (): [-0.5, -0.9],
    (1,): [-2.0, -2.1],
    (2,): [-0.7, -0.8],
    (2, 5): [-0.1, -3.0],
    (2, 6): [-0.2, -3.0],
    (1, 3): [-0.1, -3.0],
}


def test_what_was_not_asked_is_said_to_be_unknown_and_bounded():
    narrow = DynamicTree(depth=3, topk=1, size=4, **HEAT)
    for knows in (True, False):
        said = SAID if knows else {path: kids for path, kids in SAID.items() if path != (1, 3)}
        line = {"output_ids": [0, 1, 3, 9, 7], "drafts": [drafted(said, LOGP), {}, {}, {}]}
        found = lengths(narrow, of_dense(line, 2, 3))
        assert (int(found.lowest[0]), int(found.highest[0])) == ((4, 4) if knows else (1, 4))
        whole = walk(found, [0.5] * 3)
        assert (whole.fewest, whole.most) == ((1, 1) if knows else (1, 4))
        assert whole.unknown == (0 if knows else 1)
        assert found.exact[1:].all()
        wide = lengths(DynamicTree(depth=3, topk=2, size=5, **HEAT), of_dense(line, 2, 3))
        assert wide.exact.all()
        assert int(wide.sure[0]) == 2  # 1 was kept, what follows it was not


def test_more_children_than_were_recorded_are_unknown():
    line = {"output_ids": [0, 7, 7], "drafts": [drafted({(): [1, 2]}, LOGP), {}]}
    found = lengths(StaticTree(widths=[3], **HEAT), of_dense(line, 2, 1))
    assert (int(found.lowest[0]), int(found.highest[0])) == (1, 2)
    line = {"output_ids": [0, 2, 7], "drafts": [drafted({(): [1, 2]}, LOGP), {}]}
    assert lengths(StaticTree(widths=[3], **HEAT), of_dense(line, 2, 1)).exact.all()  # whatever the third may be


def test_expected_steps_are_those_of_the_walk_by_hand():
    """Place 0 emits 1, place 1 is open: it stops at once in half of all cases, else it emits two."""
    found = Lengths(*map(torch.tensor, ([1, 1, 1], [False, True, False], [1, 1, 1], [1, 2, 1], [2, 2, 2])))
    whole = walk(found, [0.5])
    assert whole.steps == 1 + 1 + 0.5
    assert (whole.fewest, whole.most) == (2, 3)
    assert whole.histogram == {1: 2.0, 2: 0.5}
    assert whole.unknown == 1


def test_costs_meet_the_runs_own_clock():
    assert [by_size({1: 1.0, 3: 2.0}, n) for n in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]
    assert by_size({4: 2.0}, 9) == 2.0
    block = {"baseline": {"target_passes": 2, "time": {"target": 2.0}}}
    assert target_prices({}, [block], [5, 5], 3.0)[0] == {1: 1.0, 5: 3.0}
    table, source = target_prices({"costs": {"target": {"1": 1.0, "5": 2.0}}}, [block], [5, 5], 3.0)
    assert table == {1: 1.5, 5: 3.0}
    assert "1.50" in source


# -- the command -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "large"
    call(cli.main, *OWN, "tree.depth=3", "tree.topk=3", "tree.size=12", "trace.dense=true", f"hydra.run.dir={folder}")
    return folder


OWN = ["target=tiny", "drafter=ngram", "drafter.min_n=1", "tracker=none", "limit=3", "max_new_tokens=16"]


def call(main, *arguments):
    """-> exit status"""
    before, sys.argv = sys.argv, ["specresearch", *arguments]
    try:
        main()
    except SystemExit as left:
        return left.code
    finally:
        sys.argv = before
    return 0


def test_the_dense_pass_stands_apart_from_the_run(run_folder):
    summary = json.loads((run_folder / "summary.json").read_text())
    lines = read_lines(run_folder / "trace.jsonl")
    dense = read_lines(run_folder / "dense.jsonl")
    assert [line["output_ids"] for line in dense] == [line["output_ids"] for line in lines]
    assert [len(line["drafts"]) for line in dense] == [len(line["output_ids"]) - 1 for line in lines]
    assert summary["steps"] == sum(len(line["steps"]) for line in lines) < sum(len(line["drafts"]) for line in dense)
    assert all("steps" not in line for line in dense)  # so that nobody counts them


def test_the_command_foretells_a_run_and_prints_the_best(run_folder, tmp_path, capsys):
    out = tmp_path / "answers.json"
    assert call(replay.main, str(run_folder), "tree.depth=1,2", "tree.size=3", f"out={out}") == 0
    answers = json.loads(out.read_text())
    for answer in answers:
        assert answer["kind"] == "exact"
        tree = [f"{key}={value}" for key, value in answer["tree"].items()]
        real = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        call(cli.main, *OWN, "tree.topk=3", *tree, "baseline=false", f"hydra.run.dir={real}")
        summary = json.loads((real / "summary.json").read_text())
        assert answer["mean_accepted_length"] == summary["mean_accepted_length"]
        assert {k: n for k, n in answer["histogram"].items() if n} == summary["accepted_length_histogram"]
        assert answer["by_kind"] == {k: own["mean_accepted_length"] for k, own in summary["by_kind"].items()}
    capsys.readouterr()
    assert call(replay.main, str(run_folder), "objective=mean_accepted_length", f"out={out}") == 0
    text, answers = capsys.readouterr().out, json.loads(out.read_text())
    best = max(answers, key=lambda answer: answer["mean_accepted_length"])
    line = next(line for line in text.splitlines() if "python -m specresearch" in line)
    assert all(f"{key}={value}" in line.split() for key, value in best["tree"].items())
    assert "drafter=ngram" in line and "trace.dense" not in line
    assert call(replay.main, str(run_folder / "trace.jsonl"), "tree.depth=1", "tree.topk=1") == 0
    assert "estimate" in capsys.readouterr().out


def test_a_resumed_run_has_each_dense_answer_once(run_folder, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(run_folder, folder)
    first = (folder / "blocks.jsonl").read_text().splitlines()[0]
    (folder / "blocks.jsonl").write_text(first + "\n")  # as if it had broken off after the first answer
    assert call(cli.main, f"resume={folder}") == 0
    assert read_lines(folder / "dense.jsonl") == read_lines(run_folder / "dense.jsonl")


def test_the_runs_own_tree_is_foretold_from_an_ordinary_trace(run_folder, tmp_path):
    out = tmp_path / "answers.json"
    assert call(replay.main, str(run_folder / "trace.jsonl"), "best=false", f"out={out}") == 0
    (answer,) = json.loads(out.read_text())
    summary = json.loads((run_folder / "summary.json").read_text())
    assert answer["kind"] == "exact"
    assert answer["mean_accepted_length"] == summary["mean_accepted_length"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["RUN", "tree.toopk=2"], "did you mean topk"),
        (["RUN", "tree=dynamc"], "did you mean dynamic"),
        (["RUN", "tree.depth=0"], "tree.depth=0"),
        (["RUN", "drafter=eagle"], "a replay changes the tree alone"),
        (["RUN", "objective=sped"], "did you mean speedup"),
        (["RUN", "best=maybe"], "best=maybe"),
        (["RUN", "--best"], "usage"),
        (["tree.depth=2"], "no run was given"),
        (["RUN", "tree.depth=[1"], "tree.depth=[1"),
        (["RUN", "tree=auto"], "ask about tree=dynamic"),
        (["RUN/summary.json"], "is no trace"),
        (["RUN", "tree=static", "tree.draw=iid", "tree.temperature=1"], "use tree.draw=topk"),
    ],
)
def test_mistakes_are_said_in_one_line(run_folder, arguments, says, capsys):
    assert call(replay.main, *(a.replace("RUN", str(run_folder)) for a in arguments)) == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert says in errors[0]


def test_of_many_trees_those_that_cannot_be_are_left_out(run_folder, capsys):
    assert call(replay.main, str(run_folder), "tree.depth=1,3", "tree.size=3,4") == 0
    text, errors = capsys.readouterr()
    assert errors.count("left out") == 1 and "tree.size=3 cannot hold tree.depth=3" in errors
    assert "best of 3" in text


def test_a_run_whose_tree_adapts_is_no_recording_unless_dense(run_folder, tmp_path, capsys):
    folder = tmp_path / "auto"
    shutil.copytree(run_folder, folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["config"]["tree"] = {"_target_": "specresearch.trees.auto.AutoTree", "depth": 3, "topk": 3, "size": 12}
    summary["config"]["tree"]["temperature"] = 0
    (folder / "summary.json").write_text(json.dumps(summary))
    assert call(replay.main, str(folder), "tree=dynamic", "tree.depth=2") == 0
    (folder / "dense.jsonl").unlink()
    assert call(replay.main, str(folder), "tree=dynamic", "tree.depth=2") == 1
    assert "another shape in every step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["drafter=none"], "trace.dense=true asks the drafter"),
        (["drafter=ngram", "temperature=1", "tree=chain"], "use tree.draw=topk"),
        (["trace.dense=maybe"], "trace"),
        (["trace.dens=true"], "trace.dense"),
    ],
)
def test_a_recording_that_cannot_be_made_is_refused(overrides, says, tmp_path, capsys):
    assert (
        call(cli.main, "target=tiny", "tracker=none", "trace.dense=true", *overrides, f"hydra.run.dir={tmp_path}/r")
        == 1
    )
    assert says in capsys.readouterr().err
