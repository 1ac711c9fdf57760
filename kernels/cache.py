"""Commit: move the accepted nodes' K and V for all layers at once. It must read and write each moved slot once."""

from __future__ import annotations

from torch import Tensor

from specresearch.kernels.backend import jit, on_triton, power_of_2, tl, triton


def move(buffer: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots inside `buffer` [L, slots, ...] (contiguous, else ValueError), in place.

    `source` and `target` [B, D+1] are flat physical slots, so that a table of pages needs no other kernel. All reads of a
    row happen before its writes, and rows do not read what others write; a pair with source == target is a no-op; targets
    must be distinct, and all must be slots of the buffer.
    """
    if not buffer.is_contiguous():
        raise ValueError("the buffer must be contiguous")
    if on_triton(buffer):
        _move_triton(buffer, source, target)
    else:
        buffer.index_copy_(1, target.flatten(), buffer.index_select(1, source.flatten()))


def _move_triton(buffer: Tensor, source: Tensor, target: Tensor) -> None:
    rows, pairs = source.shape
    count = power_of_2(pairs)
    cells = buffer[0, 0].numel()
    block = max(16, min(power_of_2(cells), 4096 // count))
    _move[(buffer.shape[0], rows, triton.cdiv(cells, block))](
        *(buffer, source.contiguous(), target.contiguous(), pairs, buffer.shape[1], cells), PAIRS=count, BLOCK=block
    )


@jit
def _move(buffer, source, target, pairs, slots, cells, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    layer, row, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    pair = tl.arange(0, PAIRS)
    here = tl.load(source + row * pairs + pair, mask=pair < pairs, other=-1)
    there = tl.load(target + row * pairs + pair, mask=pair < pairs, other=-1)
    cell = part * BLOCK + tl.arange(0, BLOCK)
    moved = ((here != there) & (here >= 0) & (there >= 0))[:, None] & (cell < cells)[None, :]
    base = buffer + layer * slots * cells + cell[None, :]
    values = tl.load(base + here[:, None] * cells, mask=moved)
    tl.debug_barrier()  # another thread's write must not overtake a read
    tl.store(base + there[:, None] * cells, values, mask=moved)
