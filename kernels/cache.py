"""Moving cached K and V between slots, for all layers at once."""

from __future__ import annotations

from torch import Tensor


def move(buffer: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots inside `buffer` [L, slots, heads, width], in place: one gather, one scatter.

    `source` and `target` are flat physical slots of equal shape, so that a table of pages needs no other kernel. All
    reads happen before any write; a pair with source == target is a no-op; targets must be distinct.
    """
    buffer.index_copy_(1, target.flatten(), buffer.index_select(1, source.flatten()))
