"""Hydra's plugins that run the jobs of a sweep elsewhere, or choose them: what they need here, and what to say without them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

OPTIONS = {
    "hydra/launcher": ("basic", "joblib", "ray", "submitit_local", "submitit_slurm"),
    "hydra/sweeper": ("basic", "optuna"),
}


def _joblib() -> dict[str, Any]:
    """As many jobs at once as there are GPUs, one without: jobs that share cores slow each other down, and are to be timed."""
    return {"hydra.launcher.n_jobs": max(torch.cuda.device_count(), 1), "hydra.launcher.batch_size": 1}


def _ray() -> dict[str, Any]:
    """A GPU of its own for each job; a job without takes all cores, for the same reason."""
    gpus = torch.cuda.device_count()
    own = {"num_cpus": max((os.cpu_count() or 1) // max(gpus, 1), 1), "num_gpus": min(gpus, 1)}
    quiet = {"+hydra.launcher.ray.init.include_dashboard": "false"}
    return quiet | {f"+hydra.launcher.ray.remote.{key}": value for key, value in own.items()}


def _local() -> dict[str, Any]:
    """All jobs would start at once."""
    return {"hydra.sweeper.max_batch_size": max(torch.cuda.device_count(), 1), "hydra.launcher.timeout_min": 1440}


def _slurm() -> dict[str, Any]:
    own = {"gpus_per_node": 1, "cpus_per_task": 8, "timeout_min": 240}
    return {f"hydra.launcher.{key}": value for key, value in own.items()}


def _optuna() -> dict[str, Any]:
    """Objectives are better when higher; a job that fails does not end the search."""
    own = {"direction": "maximize", "n_jobs": 1, "max_failure_rate": 1.0, "sampler.seed": 0}
    return {f"hydra.sweeper.{key}": value for key, value in own.items()}


DEFAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "hydra/launcher=joblib": _joblib,
    "hydra/launcher=ray": _ray,
    "hydra/launcher=submitit_local": _local,
    "hydra/launcher=submitit_slurm": _slurm,
    "hydra/sweeper=optuna": _optuna,
}


def defaults(arguments: Sequence[str]) -> list[str]:
    """Our defaults for the plugins that a command line names, for keys that it does not give. (A file in conf/ of a plugin's
    name would hide the plugin's own, which Hydra refuses.)"""
    given = {argument.partition("=")[0].lstrip("+") for argument in arguments}
    found: dict[str, Any] = {}
    for argument in arguments:
        found |= DEFAULTS.get(argument, dict)()
    if "hydra/sweeper=optuna" in arguments:
        found.pop("hydra.sweeper.max_batch_size", None)  # a key of the basic sweeper; here n_jobs says how many
    return [f"{key}={value}" for key, value in found.items() if key.lstrip("+") not in given]


def missing(group: str, option: str) -> str | None:
    """The extra of ours that brings an option that Hydra does not find; None for an option that nobody has."""
    if group.startswith("hydra/sweeper/"):
        group, option = "hydra/sweeper", "optuna"
    if option not in OPTIONS.get(group, ()):
        return None
    extra = re.sub("_.*", "", option)
    return f"{group}={option} is not installed: pip install 'specresearch[{extra}]'"
