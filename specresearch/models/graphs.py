"""Passes as CUDA graphs: on a GPU a pass over a few rows waits for its kernels to be started one by one from Python, which
takes longer than what they compute. A pass of one shape is recorded once, then started as a whole."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specresearch.kernels.graph import Record, on_gpu, record, recording
from specresearch.models.cache import SlotCache
from specresearch.models.fast import FastForward, View
from specresearch.types import Tap

MOST_NODES = 512  # of a pass: a larger one computes for longer than its launches take
MOST = 64  # graphs kept

Outputs = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class _Graph:
    inputs: Sequence[Tensor]
    replay: Callable[[], None]
    outputs: Outputs

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        for own, given in zip(self.inputs, inputs):
            own.copy_(given)
        self.replay()
        logits, features = self.outputs
        return logits.clone(), None if features is None else features.clone()  # the next replay writes there


class Graphs:
    """`FastForward`, whose passes over trees are recorded: one graph for each shape. A recorded pass is given all slots of a
    row, of which the attention reads as many as `length` says, so that a graph serves every length."""

    def __init__(self, forward: FastForward, how: Record = on_gpu):
        self.forward, self.how = forward, how
        self.known: dict[Any, _Graph] = {}
        self.made_for: tuple[Any, Any] = (lambda: None, None)  # the cache, held weakly: it may be large; the blocks
        self.works = True

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, view: View, keep: Tensor | None, taps: Sequence[Tap]
    ) -> Outputs:
        """As `FastForward`'s."""
        if not self._serves(tokens, cache, view, keep):
            return self.forward(tokens, positions, cache, view, keep, taps)
        if self.made_for[0]() is not cache or self.made_for[1] is not self.forward.stack:
            self.known.clear()
            self.made_for = weakref.ref(cache), self.forward.stack
        assert view.words is not None
        inputs = tokens, positions, cache.where, view.words, view.length
        key = tuple(tokens.shape), tuple(view.words.shape), tuple(taps)
        if key not in self.known:
            try:
                graph = self._graph(cache, inputs, taps)
            except RuntimeError as fault:  # something in the model asks the host
                self.works = False
                warnings.warn(f"this model's passes cannot be recorded as CUDA graphs: {fault}", stacklevel=2)
                return self.forward(tokens, positions, cache, view, keep, taps)
            while len(self.known) >= MOST:
                self.known.pop(next(iter(self.known)))
            self.known[key] = graph
        return self.known[key](inputs)

    def follow(self) -> None:
        self.forward.follow()

    def _serves(self, tokens: Tensor, cache: SlotCache, view: View, keep: Tensor | None) -> bool:
        small = tokens.numel() <= MOST_NODES
        return (
            self.works and not recording() and small and keep is None and cache.rows is None and view.words is not None
        )

    def _graph(self, cache: SlotCache, inputs: Sequence[Tensor], taps: Sequence[Tap]) -> _Graph:
        visible, own = cache.visible, [x.clone() for x in inputs]
        tokens, positions, where, words, length = own
        cache.aim(where, None, cache.slots)
        try:
            replay, outputs = record(
                lambda: self.forward(tokens, positions, cache, View(words, length, None), None, taps), self.how
            )
        finally:
            cache.aim(inputs[2], None, visible)
        return _Graph(own, replay, outputs)
