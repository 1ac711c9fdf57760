"""Commands that are printed: read by a shell and prepared again, they are the run's own overrides."""

import shlex
import sys
from pathlib import Path

import pytest
import yaml

from specresearch import cli, commands, overrides, sweeps
from specresearch.report.subject import command
from specresearch.results import read
from specresearch.whatif.answer import Recording
from specresearch.whatif.candidates import command as with_tree

VALUES = [
    "hello",
    "two words",
    "it's",
    'say "x"',
    "{a: b}",
    "[1,2]",
    "a,b",
    "${x} $y",
    "back\\",
    "\\'",
    "a\nb",
    "k=v",
    "'q'",
    '"',
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", ["prompts.text", "grammar.pattern", "grammar.schema", "grammar.rules", "target.id"])
def test_typed_is_prepare_backwards(key, value):
    given = [f"{key}={value}"]
    ready = overrides.prepare(given)
    words = shlex.split(commands.line(ready))[3:]
    assert overrides.prepare(words) == ready
    assert key == "target.id" or words == given or key in commands.STAND


def sweep_or_run(monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["specresearch", *given])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == cli.OK


def config(folder):
    found = yaml.safe_load((Path(folder) / "config.yaml").read_text())
    return {key: value for key, value in found.items() if key != "tree"}


BASE = [
    "target=tiny",
    "drafter=ngram",
    "tracker=none",
    "max_new_tokens=6",
    "report=false",
    "baseline=false",
    "check=false",
]
HARD = """it's {a}, "b" ${x} [c]"""


def test_commands_of_a_sweep_a_report_and_a_replay_run_again(tmp_path, monkeypatch):
    """With a prompt of all signs, an option from another folder, and a deleted key."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "my conf"
    (place / "experiment").mkdir(parents=True)
    (place / "experiment/mine.yaml").write_text("# @package _global_\nmax_new_tokens: 5\ndrafter: {extra: 1}\n")
    given = ["experiment=mine", f"hydra.searchpath=['file://{place}']", "~drafter.extra", *BASE, "prompts=text"]
    sweep_or_run(monkeypatch, "-m", *given, f"prompts.text={HARD}", "tree.depth=1,2", "hydra.sweep.dir=swept")
    job = sweeps.jobs(tmp_path / "swept")[0]
    own = Recording(read(job.folder), [], None, dense=False)
    lines = [job.command(), command(read(job.folder)), with_tree(own, {"tree": "static", "tree.widths": [2, 1]})]
    for number, line in enumerate(lines):
        words = shlex.split(line)[3:]
        assert f"prompts.text={HARD}" in words
        sweep_or_run(monkeypatch, *words, f"hydra.run.dir=run{number}")
        assert config(tmp_path / f"run{number}") == config(job.folder)
    assert yaml.safe_load((tmp_path / "run2/config.yaml").read_text())["tree"]["widths"] == [2, 1]
    sweep_or_run(monkeypatch, *shlex.split(commands.go_on(tmp_path / "run0"))[3:])


def test_a_folder_with_a_blank_is_gone_on_with(tmp_path):
    folder = tmp_path / "it's a run"
    assert shlex.split(commands.go_on(folder)) == ["python", "-m", "specresearch", f"resume={folder}"]
