"""The slot cache: K and V of every layer in two preallocated tensors, written and moved by flat physical slot."""

from __future__ import annotations

import math
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

    Layers that live on one device share one buffer [layers, heads, batch * S, width] for K and one for V, so that a commit
    is a gather and a scatter of each, and a head's attention reads K and V front to back.
    """

    def __init__(self, shapes: Sequence[LayerShape], batch: int, slots: int):
        super().__init__(layers=[SlotLayer(self, i) for i in range(len(shapes))])
        self.shapes, self.batch, self.slots = list(shapes), batch, slots
        if len({(s.heads, s.key_width, s.value_width, s.dtype) for s in shapes}) != 1:
            raise UserError("this model's layers cache K and V of different shapes, which the slot cache cannot hold")
        first, devices = shapes[0], list(dict.fromkeys(s.device for s in shapes))
        on = {d: [i for i, s in enumerate(shapes) if s.device == d] for d in devices}
        self.buffers = dict[torch.device, tuple[Tensor, Tensor]]()
        for device, layers in on.items():
            sizes = [(len(layers), first.heads, batch * slots, w) for w in (first.key_width, first.value_width)]
            need = sum(math.prod(size) for size in sizes) * first.dtype.itemsize
            require_memory(need, device, f"the cache of {batch} rows x {slots} slots")
            key, value = (torch.zeros(size, dtype=first.dtype, device=device) for size in sizes)
            self.buffers[device] = key, value
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
        keys, values = (self._write(x[index], new) for x, new in zip(self.buffers[device], (key, value)))
        return keys, values

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer.index_copy_(1, self.where.to(buffer.device), new.transpose(0, 1).flatten(1, 2))
        seen = self._by_row(buffer)
        if self.rows is None:
            return seen
        return seen[self.rows[0], None] if len(self.rows) == 1 else seen[list(self.rows)]

    def _by_row(self, buffer: Tensor) -> Tensor:
        """[..., heads, B * S, width] -> the visible slots of each row [..., B, heads, visible, width]"""
        return buffer.unflatten(-2, (self.batch, self.slots)).transpose(-4, -3)[..., : self.visible, :]

    def targets(self) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For those who write themselves, all layers being on one device: the slots aimed at; the rows aimed at, unless the
        views show them alone; of all layers, the slots for K and for V [layers, heads, B * S, width], and the rows' visible
        ones, too [layers, B, heads, visible, width]."""
        ((keys, values),) = self.buffers.values()
        seen_keys, seen_values, wanted = self._by_row(keys), self._by_row(values), None
        if self.rows is not None and len(self.rows) == 1:
            seen_keys, seen_values = seen_keys[:, self.rows[0], None], seen_values[:, self.rows[0], None]
        elif self.rows is not None:
            wanted = torch.tensor(self.rows, device=keys.device)
        return self.where, wanted, (keys, values, seen_keys, seen_values)

    def move(self, source: Tensor, target: Tensor) -> None:
        for device, buffers in self.buffers.items():
            for buffer in buffers:
                move(buffer.flatten(0, 1), source.to(device), target.to(device))


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
