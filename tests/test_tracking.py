"""W&B tracking: what a run records, read back from its file, and what W&B faults do to a run (nothing)."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import wandb
from wandb_file import read_records

from specresearch import tracked, tracking
from specresearch.lossless.blackbox import BlackBox
from specresearch.results import write_lines
from specresearch.tracked import flatten_summary
from specresearch.tracking import WandbTracker

ROOT = Path(__file__).parents[1]
UNREACHABLE = "http://127.0.0.1:9"
KEY = "0" * 40
STOPPED = "; this run's own files are complete without it"

CONFIG = {"drafter": {"name": "ngram", "depth": 4}, "seed": 7}
SUMMARY: dict[str, Any] = {
    "mean_accepted_length": 2.5,
    "accepted_length_histogram": {"1": 30, "2": 10, "4": 20},
    "acceptance_rate": 0.5,
    "acceptance_rate_by_depth": [0.5, 0.25],
    "conditional_acceptance_rate_by_depth": [0.5, None],
    "prompts": 3,
    "tokens": 150,
    "tokens_per_second": 40.0,
    "hf_speedup": None,
    "time": {"prefill": 0.5, "draft": 1.5},
    "by_kind": {"code": {"acceptance_rate": 0.75}, "chat": 2.0},
    "lossless": {"kind": "exact", "verdict": "pass"},
    "provenance": {"commit": "abc"},
}
FLAT = {
    "accept/mean_length": 2.5,
    "accept/rate": 0.5,
    "accept/rate_depth_1": 0.5,
    "accept/rate_depth_2": 0.25,
    "accept/conditional_rate_depth_1": 0.5,
    "accept/prompts": 3,
    "accept/tokens": 150,
    "accept/by_kind/code/acceptance_rate": 0.75,
    "accept/by_kind/chat": 2.0,
    "speed/tokens_per_second": 40.0,
    "speed/time/prefill": 0.5,
    "speed/time/draft": 1.5,
    "lossless/kind": "exact",
    "lossless/verdict": "pass",
}


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A W&B session of the test's own: no credentials or settings of the user's, and no reachable server."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home / name.lower()))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", UNREACHABLE)
    wandb.teardown()
    yield
    wandb.teardown()
    os.environ.pop("WANDB_SILENT", None)  # a tracker sets it


def start(folder: Path, mode: str | None) -> WandbTracker:
    tracker = WandbTracker(project="spec", entity=None, mode=mode)
    tracker.start(CONFIG, folder, group="baseline", tags=["ngram", "greedy"])
    return tracker


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, cwd=folder, env=env, capture_output=True, text=True)


def set_item(tree: dict[str, Any], item: Any) -> None:
    """Put a history or summary item, whose key may be a path, into `tree`."""
    *parents, last = list(item.nested_key) or [item.key]
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = json.loads(item.value_json)


def read_run(folder: Path) -> tuple[Any, dict[int, dict[str, Any]], dict[str, Any]]:
    """The run message, the history rows by step and the final summary of the one run in `folder`."""
    wandb.teardown()  # the service process may still be writing when finish returns
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    run: Any = None
    history: dict[int, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    for record in read_records(path):
        if record.HasField("run"):
            run = record.run
        for item in record.history.item:
            set_item(history.setdefault(record.history.step.num, {}), item)
        for item in record.summary.update:
            set_item(summary, item)
    return run, history, summary


def test_flatten_summary() -> None:
    assert flatten_summary(SUMMARY) == FLAT
    assert flatten_summary({}) == {}


def test_offline_run_reads_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a run"
    tracker = start(folder, mode=None)  # not logged in, so offline
    for step in range(300):  # enough rows for several blocks of the file
        tracker.log({"accept/mean_length": step / 4, "accept/rate": 0.125}, step)
    line = tracker.finish(SUMMARY)

    assert line is not None and "\n" not in line
    assert shlex.split(line)[-3:-1] == ["wandb", "sync"]
    assert list(folder.glob("wandb/*")) == [Path(shlex.split(line)[-1])]
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""

    run, history, summary = read_run(folder)
    assert (run.project, run.run_group, run.job_type) == ("spec", "baseline", "sweep")
    assert list(run.tags) == ["ngram", "greedy"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert sorted(history) == list(range(301))
    assert [history[step]["accept/mean_length"] for step in range(300)] == [step / 4 for step in range(300)]
    assert {key: value for key, value in summary.items() if key in FLAT} == FLAT
    histogram = history[299]["accept/length_hist"]  # in the last row
    assert histogram == {"_type": "histogram", "values": [30, 10, 0, 20], "bins": [0.5, 1.5, 2.5, 3.5, 4.5]}
    (media,) = folder.glob("wandb/*/files/" + history[300]["accept/length_table"]["path"])
    table = json.loads(media.read_text())
    assert table == {"columns": ["accepted_length", "steps"], "data": [[1, 30], [2, 10], [3, 0], [4, 20]]}


def canned(folder: Path, temperature: float = 0.0) -> dict[str, Any]:
    """A finished run of three answers, in two blocks, with everything that a tracker may show -> its summary."""
    steps = [
        {"emitted": 2, "tokens": [1, 2, 9], "parent": [-1, 0, 1]},
        {"emitted": 1, "tokens": [3, 9, 9], "parent": [-1, 0, 1]},
    ]
    line = {"kind": "chat", "turn": 0, "prompt_ids": [7], "output_ids": [1, 2, 3, 4], "finish": "eos", "steps": steps}
    lines = [{**line, "id": 0}, {**line, "id": 0, "turn": 1}, {**line, "id": "b", "kind": "code"}]
    time = dict.fromkeys(("prefill", "draft", "target", "verify", "commit"), 0.5)
    blocks: list[dict[str, Any]] = [
        {
            "block": number,
            "answers": n,
            "kinds": [kind],
            "speculative": {"tokens": 4 * n, "seconds": 2.0, "time": time, "target_passes": 2},
        }
        for number, (n, kind) in enumerate(((2, "chat"), (1, "code")))
    ]
    checks = [("lossless", 0, 0), ("near_tie", 0, 1), ("violation", "b", 0)]
    for (verdict, id, turn), block in zip(checks, (blocks[0], blocks[0], blocks[1])):
        entry = [{"verdict": verdict}]
        found = {"near_ties": entry * (verdict == "near_tie"), "violations": entry * (verdict == "violation")}
        if temperature:
            half = torch.full((5, 4), 0.25, dtype=torch.float64)
            box = BlackBox()
            box.update(half, half.flip(1), torch.tensor([0, 1, 2, 3, 0]), [id] * 5)
            block["evidence"] = box.state()
        else:
            block.setdefault("check", []).append({"id": id, "turn": turn, "equal": not entry, **found})
    write_lines(folder / "trace.jsonl", lines)
    write_lines(folder / "blocks.jsonl", blocks)
    summary = SUMMARY | {"mean_accepted_length": 1.5}
    (folder / "summary.json").write_text(json.dumps({"lossless": {}, **summary, "config": {}, "provenance": {}}))
    (folder / "tokens.json").write_text(json.dumps({"1": "a</pre>", "2": "<script>&", "3": "\n c", "7": "prompt"}))
    (folder / "report.html").write_text("<p>report</p>")
    return summary


def artifacts(folder: Path) -> dict[str, dict[str, Path]]:
    """What waits to be uploaded: {artifact: {name inside: local path}}"""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = [record.artifact for record in read_records(path) if record.HasField("artifact")]
    return {a.type + " " + a.name: {e.path: Path(e.local_path) for e in a.manifest.contents} for a in found}


def table_in(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    (media,) = folder.glob("wandb/*/files/" + row["path"])
    return json.loads(media.read_text())


def test_a_finished_run_shows_curves_answers_and_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_DATA_DIR")
    summary = canned(tmp_path)
    tracker = start(tmp_path, "offline")
    tracker.log({"x": 1.0}, 0)
    tracker.finish(summary)
    _, history, _ = read_run(tmp_path)
    rows = {key: value for row in history.values() for key, value in row.items()}
    assert table_in(tmp_path, rows["accept/by_depth_table"]) == {
        "columns": ["depth", "acceptance_rate"],
        "data": [[1, 0.5], [2, 0.25]],
    }
    assert table_in(tmp_path, rows["speed/breakdown_table"])["data"] == [["prefill", 0.5], ["draft", 1.5]]
    assert "lossless/e_process_table" not in rows  # temperature 0
    answers = table_in(tmp_path, rows["answers/table"])
    assert answers["columns"] == tracked.ANSWER_COLUMNS
    assert answers["data"] == [
        ["0", 0, "chat", 4, 2, 1.5, 4.0, "lossless", "eos"],
        ["0", 1, "chat", 4, 2, 1.5, 4.0, "near_tie", "eos"],
        ["b", 0, "code", 4, 2, 1.5, 2.0, "violation", "eos"],
    ]
    waiting = artifacts(tmp_path)
    home = tmp_path / "wandb"
    assert all(home in place.parents and place.exists() for files in waiting.values() for place in files.values())
    (report,) = (files for name, files in waiting.items() if name.startswith("report report-"))
    assert report["report.html"].read_text() == "<p>report</p>"
    (shown,) = (files for name, files in waiting.items() if "answersexamples" in name)
    pages = [place.read_text() for name, place in shown.items() if name.endswith(".html")]
    table = json.loads(next(place for name, place in shown.items() if name.endswith(".table.json")).read_text())
    assert [row[:3] for row in table["data"]] == [["0", 0, "chat"], ["b", 0, "code"], ["0", 1, "chat"]]
    assert {row[3]["_type"] for row in table["data"]} == {"html-file"}
    assert "artifact_path" in rows["answers/examples"]  # by which the pages are found
    assert all("&lt;script&gt;&amp;" in page and "<script" not in page for page in pages)


def test_every_token_is_coloured_by_its_origin() -> None:
    line = {"output_ids": [5, 6, 7, 8, 9], "steps": [{"emitted": 3}, {"emitted": 1}]}
    assert list(tracked.origins(line)) == [
        *((5, "prompt", 0), (6, "drafted", 1), (7, "drafted", 1), (8, "bonus", 1)),
        (9, "bonus", 2),
    ]
    page = tracked.provenance_html(line, {5: "e"})
    assert page.count("<span") == 5 and "&lt;9&gt;" in page  # a token without a text shows its number


def test_evidence_above_temperature_zero_is_a_curve(tmp_path: Path) -> None:
    tracker = start(tmp_path, "offline")
    tracker.finish(canned(tmp_path, temperature=1.0))
    _, history, _ = read_run(tmp_path)
    rows = {key: value for row in history.values() for key, value in row.items()}
    curve = table_in(tmp_path, rows["lossless/e_process_table"])
    assert curve["columns"] == ["tokens", "log10_e"]
    assert [tokens for tokens, _ in curve["data"]] == [5, 10]
    assert {row[7] for row in table_in(tmp_path, rows["answers/table"])["data"]} == {None}


def test_a_run_that_broke_off_shows_nothing_of_an_earlier_try(tmp_path: Path) -> None:
    canned(tmp_path)
    tracker = start(tmp_path, "offline")
    tracker.finish({})
    assert artifacts(tmp_path) == {}


def test_finish_needs_no_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "wandb sync" in (start(tmp_path, "offline").finish({}) or "")
    assert capfd.readouterr().err == ""


def test_summary_wins_over_the_last_row(tmp_path: Path) -> None:
    tracker = start(tmp_path, "offline")
    tracker.log({"accept/rate": 0.125}, 0)
    tracker.finish({"acceptance_rate": 0.5})  # no histogram, so finish has nothing of its own to log
    _, history, summary = read_run(tmp_path)
    assert history[0]["accept/rate"] == 0.125
    assert summary["accept/rate"] == 0.5


def test_runs_of_one_process_are_separate(tmp_path: Path) -> None:
    first, second = start(tmp_path / "1", "offline"), start(tmp_path / "2", "offline")
    first.log({"x": 1.0}, 0)
    second.log({"x": 2.0}, 0)
    first.finish({})
    second.finish({})
    assert [read_run(tmp_path / name)[1][0]["x"] for name in "12"] == [1.0, 2.0]


@pytest.mark.parametrize("call", ["log", "finish"])
def test_fault_in_mid_run(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk\nfull")

    tracker = start(tmp_path, "offline")
    tracker._run.log({"x": 1.0}, step=0)
    monkeypatch.setattr(tracker._run, call, fail)
    tracker.log({"x": 2.0}, 1)
    tracker.log({"x": 3.0}, 2)
    line = tracker.finish(SUMMARY)
    assert capfd.readouterr().err == f"W&B stopped: OSError: disk full{STOPPED}\n"
    assert line is not None and "wandb sync" in line
    assert read_run(tmp_path)[1][0]["x"] == 1.0  # what came before the fault is there


def test_death_of_the_service_process(tmp_path: Path) -> None:
    code = """
import subprocess, sys
from pathlib import Path
from specresearch.tracking import WandbTracker
class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        started.append(self)
started = []
subprocess.Popen = Popen
tracker = WandbTracker(project="spec", entity=None, mode="offline")
tracker.start({}, Path.cwd(), group=None, tags=[])
tracker.log({"x": 1.0}, 0)
service = next(process for process in started if "wandb-core" in str(process.args))
service.kill()
service.wait()
for step in range(1, 100):
    tracker.log({"x": 1.0}, step)
assert "wandb sync" in tracker.finish({"acceptance_rate": 0.5})
print("run goes on")
"""
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "run goes on\n")
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("W&B stopped: ") and warning.endswith(STOPPED)


class Hung:
    """A W&B run whose service does not answer until it is let go."""

    offline = True
    settings = SimpleNamespace(sync_dir="folder")
    summary = MagicMock()

    def __init__(self) -> None:
        self.held, self.callers = threading.Event(), set[Any]()

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.callers.add(threading.current_thread())
        self.held.wait(30 if threading.current_thread() is not threading.main_thread() else 0)

    finish = log


def test_a_hung_service_never_holds_up_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Hung()
    monkeypatch.setattr(WandbTracker, "_open", lambda *args, **kwargs: run)
    monkeypatch.setattr(tracking, "FINISH_TIMEOUT", 0.1)
    tracker = start(tmp_path, "offline")
    for step in range(1000):
        tracker.log({"x": 1.0}, step)
    line = tracker.finish(SUMMARY)
    assert not run.held.is_set()
    run.held.set()
    assert threading.main_thread() not in run.callers
    assert line == "W&B run is on disk; upload it with: wandb sync folder"
    warning = f"W&B stopped: TimeoutError: it has not answered for 0.2 seconds{STOPPED}\n"
    assert capfd.readouterr().err == warning


def test_interrupt_while_w_and_b_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Hung()
    monkeypatch.setattr(WandbTracker, "_open", lambda *args, **kwargs: run)
    tracker = start(tmp_path, "offline")
    threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        tracker.finish(SUMMARY)
    run.held.set()
    assert tracker._worker.close(10)


@pytest.mark.parametrize("mode", [None, "online"])
def test_unreachable_server_falls_back_to_offline(
    mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(tracking, "INIT_TIMEOUT", 1.0)
    tracker = start(tmp_path, mode)
    tracker.log({"x": 1.0}, 0)
    assert "wandb sync" in (tracker.finish(SUMMARY) or "")
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("W&B stopped: CommError: ") and warning.endswith(f", going on offline{STOPPED}")
    assert read_run(tmp_path)[1][0]["x"] == 1.0


@pytest.mark.parametrize(("key", "reason"), [(None, "RuntimeError: not logged in"), ("short", "AuthenticationError: ")])
def test_online_without_credentials_falls_back_to_offline(
    key: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    assert "wandb sync" in (start(tmp_path, "online").finish({}) or "")
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith(f"W&B stopped: {reason}")


def test_netrc_counts_as_logged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1:9\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    modes = []
    monkeypatch.setattr(wandb, "init", lambda **kwargs: modes.append(kwargs["mode"]))
    start(tmp_path, None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    start(tmp_path, None)
    start(tmp_path, "online")
    assert modes == ["online", "offline", "online"]
    assert capfd.readouterr().err == ""


def test_offline_in_the_users_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = Path(os.environ["WANDB_CONFIG_DIR"], "settings")  # what `wandb offline` writes
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nmode = offline\n")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    modes = []
    monkeypatch.setattr(wandb, "init", lambda **kwargs: modes.append(kwargs["mode"]))
    start(tmp_path, None)
    start(tmp_path, "online")
    assert modes == ["offline", "online"]
    assert capfd.readouterr().err == ""


def test_line_of_an_online_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = MagicMock(offline=False, url="https://wandb.test/run")
    run.settings.sync_dir = "folder"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(wandb, "init", lambda **kwargs: run)
    assert start(tmp_path, None).finish(SUMMARY) == "W&B run: https://wandb.test/run"
    run.finish.side_effect = TimeoutError("Timed out finishing run.")  # what is not uploaded is still on disk
    assert (start(tmp_path, None).finish(SUMMARY) or "").endswith(": wandb sync folder")
    assert capfd.readouterr().err == f"W&B stopped: TimeoutError: Timed out finishing run{STOPPED}\n"


def test_start_that_fails_leaves_a_silent_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    tracker = start(tmp_path, None)
    tracker.log({"x": 1.0}, 0)
    assert tracker.finish(SUMMARY) is None
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("W&B stopped: ModuleNotFoundError: ") and warning.endswith(STOPPED)


def test_unknown_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "unknown W&B mode 'on'; the modes are online, offline, disabled"
    with pytest.raises(ValueError, match=f"^{message}$"):
        WandbTracker(project="spec", entity=None, mode="on")
    monkeypatch.setenv("WANDB_MODE", "on")
    with pytest.raises(ValueError, match=f"^{message}$"):
        WandbTracker(project="spec", entity=None, mode=None)


def test_untracked_run_does_nothing_and_imports_no_wandb(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from specresearch.tracking import NoTracker, WandbTracker
for tracker in (NoTracker(), WandbTracker(project="spec", entity=None, mode="disabled")):
    tracker.start({}, Path.cwd(), group=None, tags=[])
    tracker.log({"x": 1.0}, 0)
    assert tracker.finish({}) is None
assert "wandb" not in sys.modules
"""
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
