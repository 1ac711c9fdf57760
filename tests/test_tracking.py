"""W&B tracking: what a run records, read back from its file, and what W&B faults do to a run (nothing)."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import wandb
from wandb_file import read_records

from specresearch import tracking
from specresearch.tracking import WandbTracker, flatten_summary

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
    assert "artifact_path" not in history[300]["accept/length_table"]  # that would point outside the run's folder


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
    tracker.log({"x": 1.0}, 0)
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


def test_interrupt_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    tracker = start(tmp_path, "offline")
    monkeypatch.setattr(tracker._run, "log", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tracker.log({"x": 1.0}, 0)


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
