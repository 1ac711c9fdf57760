"""specresearch: speculative decoding for research. One loop, every part interchangeable, proven lossless."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specresearch.build import Engine

__version__ = "0.1.0"


def engine(*overrides: str, **kwargs: Any) -> Engine:
    """An engine from the command line's overrides; see `specresearch.build.engine`."""
    from specresearch.build import engine as make

    return make(*overrides, **kwargs)
