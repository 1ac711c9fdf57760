"""What experiments share that lay times beside what the machine can do: its read bandwidth, and the bytes that a pass must
read."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

READ = 256 << 20  # bytes of the tensor that is read: no cache holds it
TIMES = 5


def bandwidth(device: torch.device, size: int = READ) -> float:
    """Bytes a second that this process reads, on torch's own threads: a float32 tensor larger than any cache is summed; the
    best of a few times, so that the floor below is the machine's and not the moment's."""
    tensor = torch.ones(size // 4, device=device)
    tensor.sum()
    return size / min(_seconds(tensor) for _ in range(TIMES))


def _seconds(tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    tensor.sum()
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def weight_bytes(model: nn.Module, itemsize: int | None = None) -> int:
    """What one pass reads of the weights, as they are held or in elements of `itemsize`: all matrices (the vocabulary's too, of
    whose embedding a pass reads a few rows alone) and the norms. Half precision holds some matrices of float32 models."""
    seen, total = set(), 0
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding) or weight.data_ptr() in seen:
                continue
            seen.add(weight.data_ptr())
            half = name == "weight" and getattr(module, "holds_half", False)
            total += weight.numel() * (itemsize or (2 if half else weight.element_size()))
    return total


def cache_bytes(target: Any) -> int:
    """K and V of one token, in all layers of an adapter's model."""
    return sum(s.heads * (s.key_width + s.value_width) * s.dtype.itemsize for s in target.shapes)


def line(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """The law a + b x of least squares -> (a, b)"""
    b, a = statistics.linear_regression(xs, ys)[:2]
    return a, b
