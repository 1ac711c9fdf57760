"""A sweep's folder, read back: which jobs it holds, what became of each, and one table across them.

Nothing here asks a running job: whatever launcher started it, on this machine or another, its folder tells.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specresearch import commands
from specresearch.results import read
from specresearch.types import UserError

ERROR = "error.txt"  # in the folder of a job that failed: why, in one line
OWN = ("resume", "objective")  # keys that say nothing about what a job measures


@dataclass(frozen=True)
class SweepJob:
    """One job. `state`: `unfinished` is one that was interrupted, or whose process ended without a word."""

    folder: Path
    overrides: dict[str, str]  # its own and those that all share, without Hydra's
    state: Literal["done", "failed", "unfinished"]
    summary: dict[str, Any] | None  # of one that is done
    reason: str  # of one that failed
    touched: float  # when it was begun, or failed: seconds since the epoch

    @property
    def verdict(self) -> str:
        return self.summary["lossless"]["verdict"] if self.summary else self.state

    def command(self) -> str:
        """The command line that runs this job alone."""
        given = commands.noted(self.folder)
        return commands.line([text for text in given if text.partition("=")[0].lstrip("+~") not in OWN])


def jobs(sweep: Path) -> list[SweepJob]:
    """All jobs that were begun, by number."""
    found = (path.parents[1] for path in sweep.glob("**/.hydra/overrides.yaml"))
    return [_job(folder) for folder in sorted(found, key=lambda p: (len(p.name), p.name)) if folder != sweep]


def _job(folder: Path) -> SweepJob:
    given = [str(text).partition("=") for text in commands.loaded(folder / ".hydra" / "overrides.yaml") or []]
    overrides = {key: value for key, _, value in given if not key.lstrip("+~").startswith("hydra")}
    failed, config = folder / ERROR, folder / "config.yaml"
    if failed.exists():
        reason = failed.read_text(encoding="utf-8").strip()
        return SweepJob(folder, overrides, "failed", None, reason, failed.stat().st_mtime)
    touched = max(path.stat().st_mtime for path in (folder / ".hydra", config) if path.exists())
    summary = _summary(folder)
    if summary is None or summary.get("interrupted"):
        return SweepJob(folder, overrides, "unfinished", None, "it did not end", touched)
    return SweepJob(folder, overrides, "done", summary, "", touched)


def _summary(folder: Path) -> dict[str, Any] | None:
    """None where there is none that can be read: going on with the job makes it anew."""
    try:
        return read(folder).summary if (folder / "summary.json").exists() else None
    except UserError:
        return None


def next_number(sweep: Path) -> int:
    """The first number that no job of this folder has."""
    return 1 + max((int(job.folder.name) for job in jobs(sweep) if job.folder.name.isdigit()), default=-1)


def same(sweep: Path, config: dict[str, Any], first: int) -> SweepJob | None:
    """The job with this resolved configuration among those numbered below `first`; one that is done, if there is one."""
    old = [job for job in jobs(sweep) if not (job.folder.name.isdigit() and int(job.folder.name) >= first)]
    wanted = _plain(config)
    found = [job for job in old if _plain(_config(job.folder)) == wanted]
    return next((job for job in found if job.state == "done"), found[0] if found else None)


def _config(folder: Path) -> dict[str, Any]:
    """Resolved; by Hydra's own file where the job was broken off before it had written one."""
    own = folder / ".hydra" / "config.yaml"
    if (folder / "config.yaml").exists() or not own.exists():
        return commands.loaded(folder / "config.yaml") or {}
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(own), resolve=True)
    except (OSError, ValueError, OmegaConfBaseException, yaml.YAMLError):
        return {}
    return config


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """As it is when read back from a file."""
    kept = {key: value for key, value in config.items() if key != "resume"}
    return yaml.safe_load(yaml.safe_dump(kept))


def discard(folder: Path) -> None:
    """Remove the folder of a job that turned out to have one already; what is no file of Hydra's stays."""
    shutil.rmtree(folder / ".hydra", ignore_errors=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def varied(found: Sequence[SweepJob]) -> list[str]:
    """The overrides that differ from job to job."""
    keys = dict.fromkeys(key for job in found for key in job.overrides if key.lstrip("+~") not in OWN)
    return [key for key in keys if len({job.overrides.get(key) for job in found}) > 1]


def best(found: Sequence[SweepJob]) -> tuple[SweepJob, str] | None:
    """The job with the highest objective, if one was named, and its name. One with a violation is never the best."""
    for name in {job.summary["config"]["objective"] for job in found if job.summary} - {None}:
        fit = [j for j in found if j.summary and j.verdict != "violation" and j.summary.get(name) is not None]
        if fit:
            return max(fit, key=lambda job: job.summary[name] if job.summary else 0.0), name
    return None


def save(sweep: Path, found: Sequence[SweepJob]) -> None:
    """sweep.json: the table, for programs."""
    numbers = ("mean_accepted_length", "tokens_per_second", "baseline_tokens_per_second", "baseline_prompts", "speedup")
    rows: list[dict[str, Any]] = []
    for job in found:
        own = {key: (job.summary or {}).get(key) for key in numbers}
        rows.append({"folder": job.folder.name, "overrides": job.overrides, "state": job.state, "verdict": job.verdict})
        rows[-1] |= own | ({"reason": job.reason} if job.reason else {})
    top = best(found)
    table = {"varied": varied(found), "jobs": rows, "best": top[0].folder.name if top else None}
    scratch = sweep / "sweep.tmp"
    scratch.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    scratch.replace(sweep / "sweep.json")
