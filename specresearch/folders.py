"""Where a machine keeps what is made there once: converted weights, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    return Path(os.environ.get("SPECRESEARCH_CACHE", Path.home() / ".cache" / "specresearch"))
