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

from specresearch.types import UserError

MODES = ("online", "offline", "disabled")
INIT_TIMEOUT = 30.0  # seconds
FINISH_TIMEOUT = 60.0  # seconds; by default W&B waits for a lost network for ever

_SPEED = "tokens_per_second baseline_tokens_per_second speedup hf_tokens_per_second hf_speedup time peak_memory_bytes"
SUMMARY_NAMES = {
    "mean_accepted_length": "accept/mean_length",
    "acceptance_rate": "accept/rate",
    "acceptance_rate_by_depth": "accept/rate_depth",
    "conditional_acceptance_rate_by_depth": "accept/conditional_rate_depth",
    **{key: f"accept/{key}" for key in ("prompts", "tokens", "steps", "target_passes", "by_kind")},
    **{key: f"speed/{key}" for key in _SPEED.split()},
    "lossless": "lossless",
}


class Tracker:
    """What a run reports to: start once, log any number of times, finish once. This one does nothing."""

    def start(self, config: dict[str, Any], folder: Path, *, group: str | None, tags: list[str]) -> None:
        """Open a run with its resolved `config`; the tracker's own files go below `folder`."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record `metrics` at `step`, which never decreases."""

    def finish(self, summary: dict[str, Any]) -> str | None:
        """Record `summary` (the contents of summary.json), close the run, return one line saying where it is."""
        return None


class NoTracker(Tracker):
    """The tracker of a run that is not tracked."""


class WandbTracker(Tracker):
    """Reports to W&B. A W&B fault costs one warning on stderr and the rest of the tracking, never the run.

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
        if self._mode != "disabled":
            with self._shield():
                self._run = self._open(config=config, dir=folder, group=group, tags=tags)

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._run is not None and not self._stopped:
            with self._shield():
                self._run.log(metrics, step=step)

    def finish(self, summary: dict[str, Any]) -> str | None:
        run, self._run, place = self._run, None, None
        if run is None:
            return None
        if not self._stopped:
            with self._shield():
                _record_summary(run, summary)
        with self._shield():  # after a fault too: what was recorded until then can still be uploaded
            run.finish()
        if self._stopped:
            _end_session()
        with self._shield():
            on_disk = f"W&B run is on disk; upload it with: wandb sync {shlex.quote(run.settings.sync_dir)}"
            place = on_disk if run.offline or self._stopped else f"W&B run: {run.url}"
        return place

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


def flatten_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Map summary.json to flat `accept/`, `speed/` and `lossless/` keys; None and other keys are dropped."""
    return {path: leaf for key, name in SUMMARY_NAMES.items() for path, leaf in _leaves(name, summary.get(key))}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf): dicts extend the path by `/key`, lists by `_1`, `_2`, ..."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}/{key}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value, start=1):
            yield from _leaves(f"{name}_{number}", item)
    elif value is not None:
        yield name, value


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
    run.summary.update(flatten_summary(summary))
    if counts:  # last: online, W&B asks the server before it takes a table
        run.log({"accept/length_table": wandb.Table(columns=["accepted_length", "steps"], data=rows)})


def _run_settings() -> Any:
    import wandb

    return wandb.Settings(
        silent=True,  # also in a session that something else opened
        console="off",
        disable_code=True,
        disable_git=True,
        symlink=False,
        x_disable_stats=True,  # a sampler would share the machine with what the run measures
        allow_offline_artifacts=False,  # so that a table's row points into the run's folder, not the home directory
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
