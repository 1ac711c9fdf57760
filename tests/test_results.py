"""Run folders read back: what a run wrote is what is found, and what is no run, or a damaged one, is said so."""

import json
import sys

import pytest
from canned import line, write

from specresearch import cli
from specresearch.results import append_lines, find, read, read_finished, read_lines, with_answers, write_lines
from specresearch.types import UserError

BLOCKS = [([line("a", [1, 2]), line("a", [3], turn=1)], 1.0, 2.0), ([line("b", [2, 2])], 0.5, 1.0)]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "run", BLOCKS)


def test_reads_what_was_written(folder):
    run = read(folder)
    assert run.folder == folder and run.pieces == {}
    assert run.lines == [each for answers, *_ in BLOCKS for each in answers]
    assert [block["speculative"]["seconds"] for block in run.blocks] == [1.0, 0.5]


def test_a_real_run_reads_back(tmp_path, monkeypatch):
    given = [
        "target=tiny",
        "drafter=ngram",
        "tracker=none",
        "limit=5",
        "batch_size=2",
        "baseline=false",
        "check=false",
        "max_new_tokens=6",
    ]
    monkeypatch.setattr(sys, "argv", ["specresearch", *given, f"hydra.run.dir={tmp_path}/run"])
    with pytest.raises(SystemExit):
        cli.main()
    (run,) = find([tmp_path / "run"])
    assert run.summary["prompts"] == len(run.lines) == 5
    assert [len(lines) for _, lines in run.by_block()] == [4, 1]
    said = {token for each in run.lines for token in each["prompt_ids"] + each["output_ids"]}
    assert said <= run.pieces.keys()
    assert "".join(run.pieces[token] for token in run.lines[0]["output_ids"]) == run.lines[0]["text"]


def test_answers_by_question_and_by_block(folder):
    run = read(folder)
    assert {id: [each["turn"] for each in lines] for id, lines in run.by_question().items()} == {"a": [0, 1], "b": [0]}
    assert [[each["id"] for each in lines] for _, lines in run.by_block()] == [["a", "a"], ["b"]]
    assert [block["block"] for block, _ in run.by_block()] == [0, 1]
    assert with_answers([], []) == []


def test_finds_runs_in_the_order_given_and_a_sweeps_jobs_by_number(tmp_path):
    for name in ("sweep/2", "sweep/10", "sweep/1", "alone"):
        write(tmp_path / name, BLOCKS)
    (tmp_path / "sweep" / "3").mkdir()  # a job that failed
    found = [run.folder.name for run in find([tmp_path / "alone", tmp_path / "sweep"])]
    assert found == ["alone", "1", "2", "10"]


def test_what_is_no_run_is_named(tmp_path, folder):
    for place in (tmp_path / "nowhere", tmp_path / "run" / "summary.json"):
        with pytest.raises(UserError, match="holds no run: give a folder with"):
            find([place])


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("summary.json", "{", "is damaged"),
        ("summary.json", "[1]", "is damaged"),
        ("summary.json", '{"score": 1}', "is no summary of a run"),
        ("tokens.json", "{", "is damaged"),
        ("blocks.jsonl", '{"answers": \n{}\n', "line 1 is damaged"),
        ("trace.jsonl", "", "has lost answers"),
        ("trace.jsonl", "7\n", "line 1 is damaged"),
    ],
)
def test_damaged_files_are_named(folder, name, text, reason):
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=reason) as error:
        read(folder)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_missing_summary(tmp_path):
    with pytest.raises(UserError, match="is missing: give the folder of a finished run"):
        read(tmp_path)


def test_a_block_that_broke_off_does_not_count(folder):
    append_lines(folder / "trace.jsonl", [line("c", [1])])
    with (folder / "trace.jsonl").open("a") as file:
        file.write('{"id": "d", "ki')  # the machine stopped here
    lines, blocks = read_finished(folder)
    assert [each["id"] for each in lines] == ["a", "a", "b"] and len(blocks) == 2


def test_lines_keep_their_text(tmp_path):
    made = [{"text": "a\u2028b\nc é"}, {"text": ""}]
    write_lines(tmp_path / "x", made[:1])
    append_lines(tmp_path / "x", made[1:])
    assert read_lines(tmp_path / "x") == made
    assert len((tmp_path / "x").read_bytes().split(b"\n")) == 3
    assert json.loads((tmp_path / "x").read_text().split("\n")[0]) == made[0]
    assert read_lines(tmp_path / "none") == []
