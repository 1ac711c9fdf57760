"""Where a result comes from: code, versions, machine, command."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specresearch.types import Target

PACKAGES = ("specresearch", "torch", "transformers", "tokenizers", "hydra-core", "wandb", "numpy", "xgrammar")


def provenance(target: Target) -> dict[str, Any]:
    device = str(target.device)
    name = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu_name()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_state(),
        "versions": {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
        "device": {"kind": device, "name": name, "threads": torch.get_num_threads(), "dtype": precision(target)},
        "platform": platform.platform(),
        "argv": sys.argv,
    }


def precision(target: Target) -> str:
    return str(target.dtype) + (" on float16 weights" if getattr(target, "half", False) else "")


def git_state() -> dict[str, Any] | None:
    """Commit of the source, and whether it was changed since; None for an installed copy."""

    def git(*args: str) -> str:
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "cpu"


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's allocator on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory() -> None:
    """Count anew from here, where the system can: a job of a sweep reports its own peak."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
