"""The experiment of several drafters: they take turns, an interrupted one goes on, its tables say what was measured."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from spec_bench_lines import questions, write
from tiny_heads import eagle_head

import specresearch
from specresearch.decode import Job, Parts
from specresearch.drafters.none import NoDrafter
from specresearch.models.checkpoints import save_head
from specresearch.run import Run
from specresearch.sampling import Sampler
from specresearch.trees.static import StaticTree
from specresearch.types import UserError
from specresearch.verifiers.greedy import Greedy

ROOT = Path(__file__).resolve().parents[1]


def experiment(name):
    """The script, as `python experiments/NAME.py` runs it: with its own folder on the path."""
    spec = importlib.util.spec_from_file_location(f"{name}_experiment", ROOT / "experiments" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "experiments"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


@pytest.fixture(scope="module")
def drafters():
    return experiment("drafters")


@pytest.fixture
def arguments(tmp_path):
    save_head(eagle_head(), tmp_path / "head")
    return [
        *(
            f"out={tmp_path}/out",
            "drafters=ngram,eagle",
            f"eagle:drafter.ckpt={tmp_path}/head",
            "target=tiny",
            "target.layers=3",
        ),
        *("limit=4", "max_new_tokens=8"),
    ]


def test_drafters_take_turns_and_go_on_after_an_interruption(drafters, arguments, tmp_path, monkeypatch, capsys):
    order, block = [], Run._block

    def watched(run, index):
        if len(order) == 7:
            order.append(None)
            raise KeyboardInterrupt
        order.append((index, run.folder.name))
        block(run, index)

    monkeypatch.setattr(Run, "_block", watched)
    with pytest.raises(SystemExit) as left:
        drafters.main("drafters", drafters.drafters(arguments), drafters.tables, arguments)
    assert left.value.code == 130
    assert f"out={tmp_path}/out" in capsys.readouterr().err
    drafters.main("drafters", drafters.drafters(arguments), drafters.tables, arguments)
    done = [o for o in order if o]
    assert [index for index, _ in done] == sorted(index for index, _ in done)
    assert sorted(done) == sorted((i, n) for i in range(4) for n in ("none", "ngram", "eagle"))
    assert [n for _, n in done[:6]] == ["none", "ngram", "eagle", "ngram", "eagle", "none"]
    text = capsys.readouterr().out
    lines = [json.loads(x) for x in (tmp_path / "out" / "ngram" / "trace.jsonl").read_text().splitlines()]
    steps = [step["emitted"] for line in lines for step in line["steps"]]
    row = next(x for x in text.splitlines() if x.startswith("| pooled |"))
    assert row.split("|")[2].strip() == f"{sum(steps) / len(steps):.2f}"
    assert "- losslessness: ngram lossless, eagle lossless" in text
    drafters.main("drafters", drafters.drafters(arguments), drafters.tables, arguments)  # complete: only read
    assert capsys.readouterr().out == text
    assert len(order) == 13


def test_costs_are_in_steps_of_plain_decoding(drafters):
    def block(seconds, draft, target):
        time = {"prefill": 5.0, "draft": draft, "target": target, "verify": 0.0, "commit": 0.0, "other": 0.0}
        return {"speculative": {"seconds": seconds, "target_passes": 10, "time": time, "tokens": 20}}

    rows = drafters.costs({"none": ([], [block(6.0, 0.0, 0.9)]), "eagle": ([], [block(7.5, 0.5, 1.5)])}).splitlines()
    assert rows[2] == "| none | 0.00 | 0.90 | 0.10 | 0% |"
    assert rows[3] == "| eagle | 0.50 | 1.50 | 0.50 | 20% |"


def test_mistakes_are_said_in_one_line(drafters, tmp_path, capsys):
    for arguments, says in ((["drafters=eagel"], "eagel"), (["limitt=3"], "limitt")):
        given = [f"out={tmp_path}/out", "target=tiny", *arguments]
        with pytest.raises(SystemExit) as left:
            drafters.main("drafters", drafters.drafters(given), drafters.tables, given)
        assert left.value.code == 1
        assert says in capsys.readouterr().err.strip().splitlines()[-1]


def test_spec_bench_is_answered_by_all_and_printed_by_group(tmp_path, capsys):
    own = experiment("spec_bench")
    path = write(tmp_path / "question.jsonl", questions(2))
    arguments = [
        f"out={tmp_path}/out",
        "drafters=ngram",
        f"prompts.path={path}",
        "target=tiny",
        "limit=6",
        "max_new_tokens=6",
    ]
    own.main("spec_bench", own.drafters(arguments), own.tables, arguments)
    text = capsys.readouterr().out
    tables = {block.split("|")[1].strip(): block for block in text.split("\n\n") if block.startswith("|")}
    labels = [row.split("|")[1].strip() for row in tables["speedup"].splitlines()[2:]]
    assert labels == ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "overall"]
    blocks = {
        name: [
            json.loads(x)["speculative"] for x in (tmp_path / "out" / name / "blocks.jsonl").read_text().splitlines()
        ]
        for name in ("none", "ngram")
    }
    rates = [sum(b["tokens"] for b in each) / sum(b["seconds"] for b in each) for each in blocks.values()]
    assert f"| overall | {rates[1] / rates[0]:.2f} |" in tables["speedup"]
    own.main("spec_bench", own.drafters(arguments), own.tables, arguments)  # complete: only read
    assert capsys.readouterr().out == text


@pytest.mark.slow
def test_the_auditor_sees_the_pruned_head_and_passes_the_whole_one(tmp_path):
    auditor = experiment("auditor")
    parts = specresearch.engine("target=tiny", "drafter=none", "temperature=1").parts
    where = auditor.assistant(tmp_path, "other")
    assert auditor.audit(parts, where, prune=False, tokens=400).verdict == "consistent"
    assert auditor.audit(parts, where, prune=True, tokens=1500).verdict == "violation"


def load(name, monkeypatch):
    """An experiment as it is when run: its neighbours can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    spec = importlib.util.spec_from_file_location(f"{name}_experiment", ROOT / "experiments" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(tmp_path):
    save_head(eagle_head(), tmp_path / "head")
    given = ["target=tiny", "target.layers=3", f"drafter.ckpt={tmp_path}/head", "limit=2", "max_new_tokens=8"]
    return [f"out={tmp_path}/out", *(f"{g}" for g in given)]


@pytest.mark.parametrize("name", ["policies", pytest.param("rules", marks=pytest.mark.slow)])
def test_trees_and_rules_take_turns(name, small, monkeypatch, capsys):
    own = load(name, monkeypatch)
    monkeypatch.setattr(own, "TEMPERATURES", (1.0,), raising=False)
    variants = (
        {n: ["drafter=eagle", *tree] for n, tree in own.POLICIES.items()} if name == "policies" else own.variants()
    )
    # Plain decoding has no head.
    given = [a for a in small if not a.startswith("drafter.")]
    head = next(a for a in small if a.startswith("drafter."))
    own.main(name, {n: [*o, head] for n, o in variants.items()}, own.tables, given)
    text = capsys.readouterr().out
    assert "-" not in {cell.strip() for row in text.splitlines() if row.startswith("| acc") for cell in row.split("|")}
    assert "violation" not in text and text.count("|") > 20


@pytest.mark.slow
def test_sweeps_are_read(tmp_path, monkeypatch, capsys):
    save_head(eagle_head(), tmp_path / "head")
    shape, prediction, breakdown = (load(name, monkeypatch) for name in ("shape", "prediction", "breakdown"))
    monkeypatch.setattr(shape, "__file__", str(tmp_path / "shape.py"))
    monkeypatch.chdir(tmp_path)
    given = ["target=tiny", "target.layers=3", "limit=2", "max_new_tokens=8", f"drafter.ckpt={tmp_path}/head"]
    shape.main("shape", shape.show, [*given, "tree.depth=1,2", "tree.topk=2"])
    text = capsys.readouterr().out
    assert "losslessness: lossless" in text and text.count("| depth ") == 4
    assert "<svg" in (tmp_path / "shape.svg").read_text()
    (folder,) = (tmp_path / "runs" / "shape").iterdir()
    for module in (prediction, breakdown):
        module.main("unused", module.show, [str(folder)])
        rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("|")]
        assert len(rows) == 4


def test_drafts_that_are_always_wrong_are_timed_step_by_step(arguments, capsys):
    script = experiment("fallback")
    with pytest.raises(SystemExit) as ended:
        script.main(["drafters=ngram,eagle", "repeats=2", *arguments[2:]])
    assert ended.value.code == 0
    head, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [row[0] for row in rows] == ["ngram", "eagle"]
    for cells in (dict(zip(head, row)) for row in rows):
        drafted, steps = map(int, cells["steps with a draft"].split(" of "))
        assert 0 < steps <= 7 * 7 and drafted <= steps, "seven more answers of eight tokens; the first is the prompt's"
        assert int(cells["accepted"]) == 0 and all(float(cells[name]) > 0 for name in ("first question", "the others"))


def test_an_answer_that_drafts_changed_is_no_measurement(target):
    script = experiment("fallback")
    parts = Parts(target, NoDrafter(target), StaticTree(temperature=0, parents=[-1]), Greedy(), Sampler())
    modes = script.decoders(parts, 40)
    found = script.answer(modes, Job(0, "", 0, [65, 66, 67], 6), "plain")
    assert all((spent.tokens, spent.steps, spent.asked) == (5, 5, 0) and spent.seconds > 0 for spent in found.values())
    modes["auto"].parts.sampler.logit_bias = {7: 1e4}  # the plain one has parts of its own
    modes["plain"].parts = replace(modes["plain"].parts, sampler=Sampler())
    with pytest.raises(UserError, match="answered differently"):
        script.answer(modes, Job(1, "", 0, [65, 66, 67], 6), "auto")


def test_passes_are_timed_with_and_without_what_is_compiled(capsys, monkeypatch):
    script = experiment("passes")
    if not script.cpu.serves():
        pytest.skip("needs an x86 CPU with AVX2 and a C++ compiler")
    monkeypatch.setattr(script, "ROWS", (1, 5))
    with pytest.raises(SystemExit, match="1"):
        script.main(["rounds=0"])
    script.main(["rounds=1", "target=tiny"])
    head, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [row[0] for row in rows] == ["1", "5"] and all(len(row) == len(head) for row in rows)
