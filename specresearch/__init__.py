"""specresearch: speculative decoding for research. One loop, every part interchangeable, proven lossless."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specresearch.build import Engine

__version__ = "0.1.0"


def engine(*overrides: str, **kwargs: Any) -> Engine:
    """An engine from the command line's overrides; see `specresearch.build.engine`."""
    from specresearch.build import engine as make

    return make(*overrides, **kwargs)


def _quiet(kind: type[BaseException], *fault: Any) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, *fault)


if sys.argv[:1] == ["-m"]:  # a command of ours begins: Ctrl-C while its modules are imported needs no traceback
    sys.excepthook = _quiet
