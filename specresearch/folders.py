"""Where a machine keeps what is made there once: converted weights, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    given = os.environ.get("SPECRESEARCH_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "specresearch"
