"""The slot cache: K and V of every layer in one preallocated tensor, written and moved by flat physical slot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specresearch.kernels.cache import move
from specresearch.types import UserError


@dataclass(frozen=True)
class LayerShape:
    """K and V of one cached layer, as a probe of the model showed them."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's window on the slot cache, in the form that transformers asks for."""

    is_sliding = False

    def __init__(self, cache: SlotCache, index: int):
        super().__init__()
        self.cache, self.index = cache, index

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.write(self.index, key_states, value_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None: ...

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0  # positions and masks are always given explicitly, so nothing may be derived from this

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.cache.visible, 0

    def get_max_length(self) -> int:
        return self.cache.slots

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


class SlotCache(Cache):  # type: ignore[misc]
    """Row b owns the slots b*S .. b*S+S-1. Who is where is the caller's business: `aim` says it for the next pass.

    Layers that live on one device share one buffer [layers, batch * S, heads, key_width + value_width], so that a commit
    is one gather and one scatter.
    """

    def __init__(self, shapes: Sequence[LayerShape], batch: int, slots: int):
        super().__init__(layers=[SlotLayer(self, i) for i in range(len(shapes))])
        self.shapes, self.batch, self.slots = list(shapes), batch, slots
        if len({(s.heads, s.key_width, s.value_width, s.dtype) for s in shapes}) != 1:
            raise UserError("this model's layers cache K and V of different shapes, which the slot cache cannot hold")
        first, devices = shapes[0], list(dict.fromkeys(s.device for s in shapes))
        self.key_width = first.key_width
        width = first.key_width + first.value_width
        on = {d: [i for i, s in enumerate(shapes) if s.device == d] for d in devices}
        for device, layers in on.items():
            need = len(layers) * batch * slots * first.heads * width * first.dtype.itemsize
            require_memory(need, device, f"the cache of {batch} rows x {slots} slots")
        self.buffers = {
            d: torch.zeros(len(i), batch * slots, first.heads, width, dtype=first.dtype, device=d)
            for d, i in on.items()
        }
        self.place = {layer: (d, n) for d, layers in on.items() for n, layer in enumerate(layers)}
        self.visible = 0

    def aim(self, slots: Tensor, rows: Sequence[int] | None, visible: int) -> None:
        """The next pass writes its tokens to flat `slots` [R*q], and sees the first `visible` slots of `rows` (all if None)."""
        if visible > self.slots:
            raise UserError(
                f"{visible} cache slots are needed and {self.slots} were reserved: the tree asks for too much"
            )
        self.where, self.rows, self.visible = slots, rows, visible

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """K, V [R, heads, q, width] of the new tokens -> all K, V of the rows [R, heads, visible, width], as views."""
        device, index = self.place[layer]
        buffer = self.buffers[device][index]
        packed = torch.cat([key, value], -1).transpose(1, 2).flatten(0, 1)
        buffer.index_copy_(0, self.where.to(device), packed)
        seen = buffer.view(self.batch, self.slots, *buffer.shape[1:])[:, : self.visible]
        if self.rows is not None:
            seen = seen[self.rows[0], None] if len(self.rows) == 1 else seen[list(self.rows)]
        seen = seen.transpose(1, 2)
        return seen[..., : self.key_width], seen[..., self.key_width :]

    def targets(self) -> tuple[Tensor, Tensor | None, list[tuple[Tensor, Tensor]]]:
        """For those who write themselves, all layers being on one device: the slots aimed at; the rows aimed at, unless the
        views show them alone; each layer's slots [B * S, heads, width] and its rows' visible ones [B, S, heads, width]."""
        (buffer,) = self.buffers.values()
        rows = buffer.view(len(self.shapes), self.batch, self.slots, *buffer.shape[2:])[:, :, : self.visible]
        wanted = None
        if self.rows is not None and len(self.rows) == 1:
            rows = rows[:, self.rows[0], None]
        elif self.rows is not None:
            wanted = torch.tensor(self.rows, device=buffer.device)
        return self.where, wanted, list(zip(buffer.unbind(0), rows.unbind(0)))

    def move(self, source: Tensor, target: Tensor) -> None:
        for device, buffer in self.buffers.items():
            move(buffer, source.to(device), target.to(device))


def require_memory(need: int, device: torch.device, what: str) -> None:
    """Refuse what would not fit, before it is allocated. Raises UserError with both figures."""
    free = free_memory(device)
    if need > free:
        raise UserError(
            f"{what} needs {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free on {device}: "
            "lower batch_size, max_new_tokens or the length of the prompts"
        )


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as info:
            return next(int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
