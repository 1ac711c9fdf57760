"""The three layouts of a tree mask: full (prefix + tree), tree only, and one bit a cell.

Legend: B rows of the batch, n nodes of a tree. A cell (i, j) says that node i sees node j. Packed, bit j of a row (least
significant first, little-endian) is cell j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from specresearch.kernels.graph import constant

Mode = Literal["full", "qlen_only", "qlen_only_bitpacking"]
MODES: tuple[Mode, ...] = ("full", "qlen_only", "qlen_only_bitpacking")
MOST_NODES = 1024
_ITEM = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}  # bits of one item -> its type


def words_of(nodes: int) -> int:
    return -(-nodes // 32)


def pack_words(mask: Tensor) -> Tensor:
    """bool [..., n] -> int32 [..., ceil(n / 32)]"""
    bits = pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 8))
    weights = constant((1, 2, 4, 8, 16, 32, 64, 128), mask.device, torch.uint8)
    return (bits * weights).sum(-1, dtype=torch.uint8).view(torch.int32)


def pack(mask: Tensor) -> Tensor:
    """bool [..., n] -> one uint8, uint16 or uint32 [...] for n up to 8, 16, 32; above that int32 [..., ceil(n / 32)]."""
    nodes = mask.shape[-1]
    if nodes > MOST_NODES:
        raise ValueError(f"a tree of {nodes} nodes: a packed mask holds {MOST_NODES} at most")
    words = pack_words(mask)
    for bits, dtype in _ITEM.items():
        if nodes <= bits:
            return words.view(torch.uint8)[..., : bits // 8].contiguous().view(dtype)[..., 0]
    return words


def unpack(packed: Tensor, nodes: int) -> Tensor:
    """What `pack` or `pack_words` made of bool [..., nodes] -> the mask again."""
    if packed.dtype != torch.int32:
        packed = packed[..., None]
    octets = packed.contiguous().view(torch.uint8)
    bits = octets[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return bits.flatten(-2)[..., :nodes].bool()


def layout(mask: Tensor, seq_lens: Tensor, mode: Mode) -> Tensor:
    """Tree cells bool [B, n, n] -> the flat mask of one layout.

    full: for each request n rows of seq_len + n cells, the prefix visible to all. Its size depends on `seq_lens` [B], so
    it waits for the device once.
    """
    if mode == "qlen_only":
        return mask.flatten()
    if mode == "qlen_only_bitpacking":
        return pack(mask).flatten(0, 1)
    if mode != "full":
        raise ValueError(f"mask_mode={mode!r}: use one of {', '.join(MODES)}")
    nodes = mask.shape[1]
    lengths = seq_lens.tolist()
    if min(lengths, default=0) < 0:
        raise ValueError(f"seq_lens={lengths}: a length is 0 or more")
    width = (seq_lens + nodes)[:, None].expand(-1, nodes)
    start = (width.flatten().cumsum(0) - width.flatten()).view_as(width)
    flat = torch.ones(nbytes("full", nodes, lengths), dtype=torch.bool, device=mask.device)
    cell = (start + seq_lens[:, None])[..., None] + torch.arange(nodes, device=mask.device)
    return flat.scatter_(0, cell.flatten(), mask.flatten())


def nbytes(mode: Mode, nodes: int, seq_lens: Sequence[int]) -> int:
    """Memory of one layout: 4 requests of 8k tokens and 64 nodes take 2 MB full, 16 kB tree only, 2 kB packed."""
    batch = len(seq_lens)
    if mode == "full":
        return nodes * (sum(seq_lens) + batch * nodes)
    if mode == "qlen_only":
        return batch * nodes * nodes
    return batch * nodes * next((bits // 8 for bits in _ITEM if nodes <= bits), 4 * words_of(nodes))
