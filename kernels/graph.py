"""Work on a GPU that is recorded once and then started as a whole (a CUDA graph), and what such work must not do: ask the
device, or take numbers from the host, both of which wait until the device has caught up."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Record = Callable[[Callable[[], Any], Callable[[], None]], tuple[Callable[[], None], Any]]
_recording = [False]


def recording() -> bool:
    """Whether what runs now runs in order to be recorded."""
    return _recording[0]


def record(
    work: Callable[[], Any], how: Record, rewind: Callable[[], None] = lambda: None
) -> tuple[Callable[[], None], Any]:
    """Record `work` by `how` -> what does it again, and its results, which are written anew each time.

    `work` happens several times in the course of it; `rewind` puts back before each what it must find. Raises what it
    raises; RuntimeError where it does what cannot be recorded.
    """
    _recording[0] = True
    try:
        return how(work, rewind)
    finally:
        _recording[0] = False


def on_gpu(work: Callable[[], Any], rewind: Callable[[], None]) -> tuple[Callable[[], None], Any]:
    aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
    aside.wait_stream(here)
    try:
        with torch.cuda.stream(aside):
            for _ in range(2):  # compiles kernels and lets libraries allocate, which no recording may hold
                rewind()
                work()
    finally:
        here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    return graph.replay, outputs


def may_ask(device: torch.device) -> bool:
    """Whether asking for a value costs nothing: loops may then end early, and widths be as small as they can."""
    return device.type == "cpu" and not recording()


@cache
def constant(values: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """A tensor of numbers that are known beforehand; it is brought to the device once. It must not be written to."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
