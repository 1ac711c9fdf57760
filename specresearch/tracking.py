"""Experiment tracking behind three calls. Only this module knows W&B, and imports it only when a run starts."""

import os
import shlex
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from specresearch import tracked
from specresearch.results import Results, read
from specresearch.types import UserError
from specresearch.worker import Worker

MODES = ("online", "offline", "disabled")
INIT_TIMEOUT = 30.0  # seconds
FINISH_TIMEOUT = 60.0  # seconds to send the last records, and as many to close; by default W&B waits for ever


class Tracker:
    """What a run reports to: start once, log any number of times, finish once. This one does nothing."""

    def start(self, config: dict[str, Any], folder: Path, *, group: str | None, tags: list[str]) -> None:
        """Open a run with its resolved `config`; the tracker's own files go below `folder`."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record `metrics` at `step`, which never decreases."""

    def finish(self, summary: dict[str, Any]) -> str | None:
        """Record `summary` (the contents of summary.json) and what the run's folder holds, and close the run.

        Returns one line saying where it is. An empty summary: the run broke off.
        """
        return None


class NoTracker(Tracker):
    """The tracker of a run that is not tracked."""


class WandbTracker(Tracker):
    """Reports to W&B. A W&B fault costs one warning on stderr and the rest of the tracking, never the run nor its time.

    `mode` is one of `MODES`. None means WANDB_MODE, else online where the user is logged in, else offline.
    """

    def __init__(self, *, project: str, entity: str | None, mode: str | None) -> None:
        self._mode = mode or os.environ.get("WANDB_MODE") or None
        if self._mode not in (None, *MODES):
            raise UserError(f"unknown W&B mode {self._mode!r}; the modes are {', '.join(MODES)}")
        self._project, self._entity = project, entity
        self._run: Any = None
        self._stopped = False

    def start(self, config: dict[str, Any], folder: Path, *, group: str | None, tags: list[str]) -> None:
        self._folder = folder
        if self._mode != "disabled":
            with self._shield():
                self._run = self._open(config=config, dir=folder, group=group, tags=tags)
        if self._run is not None:
            self._worker = Worker()

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._run is not None and not self._stopped:
            self._worker.send(partial(self._log, self._run, metrics, step))

    def finish(self, summary: dict[str, Any]) -> str | None:
        run, self._run = self._run, None
        if run is None:
            return None
        self._worker.send(partial(self._finish, run, summary))
        if not self._worker.close(2 * FINISH_TIMEOUT):
            with self._shield():
                raise TimeoutError(f"it has not answered for {2 * FINISH_TIMEOUT:g} seconds")
        place = None
        with self._shield():
            on_disk = f"W&B run is on disk; upload it with: wandb sync {shlex.quote(run.settings.sync_dir)}"
            place = on_disk if run.offline or self._stopped else f"W&B run: {run.url}"
        return place

    def _log(self, run: Any, metrics: dict[str, float], step: int) -> None:
        if not self._stopped:
            with self._shield():
                run.log(metrics, step=step)

    def _finish(self, run: Any, summary: dict[str, Any]) -> None:
        if not self._stopped:
            with self._shield():
                _record_summary(run, summary)
                if summary:
                    _record_folder(run, self._folder)
        with self._shield():  # after a fault too: what was recorded until then can still be uploaded
            run.finish()
        if self._stopped:
            _end_session()

    def _open(self, **run: Any) -> Any:
        """Start the run in the mode asked for. Where going online fails, warn and start it offline."""
        os.environ.setdefault("WANDB_SILENT", "true")  # the setting misses what W&B prints while it loads settings
        import wandb

        if self._mode == "online":
            wandb.setup(wandb.Settings(mode="online"))  # login refuses while the user's settings say offline
        kind = "sweep" if run.get("group") else "decode"
        init = partial(wandb.init, project=self._project, entity=self._entity, job_type=kind, **run)
        if self._mode != "offline":
            try:
                if wandb.login(prompt=False, verify=False):  # looks for credentials; neither asks nor connects
                    return init(mode="online", settings=_run_settings())
                if self._mode == "online":
                    raise RuntimeError("not logged in (see `wandb login`)")
            except Exception as error:
                _warn(error, ", going on offline")
        return init(mode="offline", settings=_run_settings())

    @contextmanager
    def _shield(self) -> Iterator[None]:
        """Turn the first Exception (not KeyboardInterrupt) into a warning, drop later ones."""
        try:
            yield
        except Exception as error:
            if not self._stopped:
                _warn(error)
            self._stopped = True


def _record_summary(run: Any, summary: dict[str, Any]) -> None:
    """Set the run's summary; log the accepted lengths as a histogram (one bin per length) and as a table."""
    import numpy as np
    import wandb

    counts = {int(length): count for length, count in (summary.get("accepted_length_histogram") or {}).items()}
    lengths = range(min(counts, default=1), max(counts, default=0) + 1)
    rows = [[length, counts.get(length, 0)] for length in lengths]
    charts = {}
    if counts:
        edges = np.arange(lengths.start, lengths.stop + 1) - 0.5
        charts["accept/length_hist"] = wandb.Histogram(np_histogram=(np.array([steps for _, steps in rows]), edges))
    run.log(charts, commit=True)  # before the summary: a row that closes overwrites the keys they share
    run.summary.update(tracked.flatten_summary(summary))
    media = _charts(summary)
    if counts:
        media["accept/length_table"] = wandb.Table(columns=["accepted_length", "steps"], data=rows)
    if media:  # last: online, W&B asks the server before it takes a table
        with _staged_beside(run):
            run.log(media)


def _charts(summary: dict[str, Any]) -> dict[str, Any]:
    charts: dict[str, Any] = {}
    if rows := tracked.depth_rows(summary):
        charts["accept/by_depth"] = _line(rows, "depth", "acceptance_rate", "Acceptance rate by depth")
    if rows := tracked.time_rows(summary):
        import wandb

        table = wandb.Table(columns=["part", "seconds"], data=rows)
        charts["speed/breakdown"] = wandb.plot.bar(table, "part", "seconds", title="Where the time went")
    return charts


def _line(rows: list[list[Any]], x: str, y: str, title: str) -> Any:
    import wandb

    return wandb.plot.line(wandb.Table(columns=[x, y], data=rows), x, y, title=title)


def _record_folder(run: Any, folder: Path) -> None:
    """The answers, some of them coloured, the evidence, and the report if there is one."""
    with _staged_beside(run):
        if (folder / "summary.json").exists():
            run.log(_answers(read(folder)))
        if (folder / "report.html").exists():
            import wandb

            report = wandb.Artifact(f"report-{run.id}", type="report")
            report.add_file(str(folder / "report.html"))
            run.log_artifact(report)


def _answers(done: Results) -> dict[str, Any]:
    import wandb

    rows = tracked.answer_rows(done.lines, done.blocks)
    found = {"answers/table": wandb.Table(columns=tracked.ANSWER_COLUMNS, data=rows, allow_mixed_types=True)}
    if done.lines:
        shown = [
            [
                str(line["id"]),
                line["turn"],
                line["kind"],
                wandb.Html(tracked.provenance_html(line, done.pieces), inject=False),
            ]
            for line in tracked.examples(done.lines)
        ]
        found["answers/examples"] = wandb.Table(columns=["id", "turn", "kind", "answer"], data=shown)
    if curve := tracked.evidence_rows(done.blocks):
        title = "Evidence against losslessness (log10 E)"
        found["lossless/e_process"] = _line(curve, "tokens", "log10_e", title)
    return found


@contextmanager
def _staged_beside(run: Any) -> Iterator[None]:
    """Let what is to be uploaded wait in the run's folder, not in the home directory, unless the user has said where."""
    name = "WANDB_DATA_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(Path(run.settings.sync_dir) / "staged")
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _run_settings() -> Any:
    import wandb

    return wandb.Settings(
        silent=True,  # also in a session that something else opened
        console="off",
        disable_code=True,
        disable_git=True,
        symlink=False,
        x_disable_stats=True,  # a sampler would share the machine with what the run measures
        allow_offline_artifacts=True,  # a table's HTML is found through its artifact alone
        reinit="create_new",  # the default would return an unfinished earlier run of this process
        init_timeout=INIT_TIMEOUT,
        finish_timeout=FINISH_TIMEOUT,
        finish_timeout_raises=True,
    )


def _end_session() -> None:
    """Stop W&B's service process: one that died would print a traceback at exit."""
    import wandb

    with suppress(Exception, SystemExit):  # it exits with the service's exit code
        wandb.teardown()


def _warn(error: Exception, then: str = "") -> None:
    reason = textwrap.shorten(f"{type(error).__name__}: {error}", width=300, placeholder=" ...").rstrip(".: ")
    print(f"W&B stopped: {reason}{then}; this run's own files are complete without it", file=sys.stderr, flush=True)
