"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specresearch.kernels.graph import recording

Mark = tuple[str, Any]


class Clock:
    """Wall time by part. On CUDA by events, read once a step, so that timing does not serialise host and device."""

    PARTS = ("prefill", "draft", "target", "verify", "commit", "other")

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.PARTS, 0.0)
        self.marks: list[Mark] = []

    def mark(self, part: str) -> None:
        """The time from here to the next mark belongs to `part`."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True, **({"external": True} if recording() else {}))
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    @contextmanager
    def apart(self) -> Iterator[list[Mark]]:
        """For a recording: the marks made meanwhile, which count where it is played."""
        own, self.marks = self.marks, []
        try:
            yield self.marks
        finally:
            self.marks = own

    def settle(self) -> float:
        """Close the last part, add up; called where the host has waited for the device anyway -> seconds since the first."""
        self.mark("other")
        if self.cuda:
            torch.cuda.synchronize()
        span = [self._between(a, b) for (_, a), (_, b) in zip(self.marks, self.marks[1:])]
        for (part, _), seconds in zip(self.marks, span):
            self.seconds[part] += seconds
        self.marks.clear()
        return sum(span)

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1e3 if self.cuda else b - a
