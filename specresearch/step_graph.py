"""A step as one CUDA graph: drafting, the target's pass, verification and commit are recorded once and started as a whole, so
that the host does nothing between one read and the next, and no memory is taken."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specresearch.clock import Clock, Mark
from specresearch.kernels.graph import Record, on_gpu, record
from specresearch.types import Kept

Place = tuple[int, str]  # an object's number, and the name of an attribute
LEAST = 256  # tokens; a graph serves all lengths up to a power of two, since only what is beyond a row's own is masked


class StepGraphs:
    """Does `work(extent)`, by a recording of it where all that it needs is on the device."""

    def __init__(self, work: Callable[[int], Any], clock: Clock, most: int):
        """`most` = the largest extent."""
        self.work, self.clock, self.most = work, clock, most
        # By events within the graph its parts are timed, which ROCm does not do (nor torch before 2.9: recording fails there).
        self.how: Record | None = on_gpu if clock.cuda and torch.version.hip is None else None
        self.holders: Sequence[object] | None = None
        self.fixed: Sequence[weakref.ref[object]] = ()
        self.known: dict[int, _Graph] = {}  # by extent
        self.settled: dict[int, Any] = {}  # by extent: the form that a step found and left, so that it may be recorded
        self.played = 0

    def follow(self, kept: Kept | None) -> None:
        """What the next steps go by, whenever it may have changed. None: it is not all on the device."""
        self.holders, fixed = (kept.state, kept.fixed) if kept else (None, ())
        if [ref() for ref in self.fixed] != [*fixed]:
            self.known.clear()
            self.settled.clear()
            self.fixed = [weakref.ref(each) for each in fixed]  # weakly: caches are large

    def __call__(self, extent: int) -> Any:
        """-> what `work` gives, in tensors that the next call may write over."""
        if self.how is None or self.holders is None:
            return self.work(extent)
        extent, state = min(max(LEAST, 1 << (extent - 1).bit_length()), self.most), State(self.holders)
        graph = self.known.get(extent)
        if (graph is None or graph.state.form != state.form) and self.settled.get(extent) == state.form:
            graph = self._record(extent, state)
        if graph is not None and graph.state.form == state.form:
            return self._play(graph, state)
        outputs = self.work(extent)  # the first steps after a prompt may find other shapes than all others
        self.settled[extent] = state.form if State(self.holders).form == state.form else None
        return outputs

    def _record(self, extent: int, state: State) -> _Graph | None:
        marks: list[Mark] = []

        def work() -> Any:
            with self.clock.apart() as fresh:
                outputs = self.work(extent)
            marks[:] = fresh
            state.settle()
            return outputs

        assert self.how is not None
        before = {place: x.clone() for place, x in state.tensors.items()}
        try:
            replay, outputs = record(work, self.how, lambda: state.take(before))
            self.known[extent] = _Graph(state, marks, replay, outputs)
            return self.known[extent]
        except (RuntimeError, TypeError) as fault:
            self.how = None
            self.known.clear()
            warnings.warn(f"the steps of this run cannot be recorded as CUDA graphs: {fault}", stacklevel=3)
            return None
        finally:
            state.take(before)

    def _play(self, graph: _Graph, state: State) -> Any:
        graph.state.take(state.tensors)
        self.clock.marks += graph.marks
        graph.replay()
        self.played += 1
        return graph.outputs


class State:
    """The tensors among the attributes of some objects."""

    def __init__(self, holders: Sequence[object]):
        self.holders = holders
        every = [((i, name), x) for i, holder in enumerate(holders) for name, x in vars(holder).items()]
        self.tensors = {place: x for place, x in every if isinstance(x, Tensor)}
        # What a recording takes for granted: shapes, and what is kept on the host.
        shapes = {place: (x.shape, x.dtype) for place, x in self.tensors.items()}
        self.form = shapes, {place: x for place, x in every if isinstance(x, int | float | str | None)}

    def take(self, content: Mapping[Place, Tensor]) -> None:
        """Fill these tensors with `content`, and give them to the objects."""
        # Copies first, since tensors may have traded places.
        fresh = {place: x.clone() for place, x in content.items() if x is not self.tensors[place]}
        for (i, name), own in self.tensors.items():
            if (i, name) in fresh:
                own.copy_(fresh[i, name])
            setattr(self.holders[i], name, own)

    def settle(self) -> None:
        """Fill these tensors with what the objects hold by now. Raises RuntimeError where that has another form."""
        now = State(self.holders)
        if now.form != self.form:
            raise RuntimeError("what is kept from one step to the next has changed its form")
        self.take(now.tensors)


@dataclass(frozen=True)
class _Graph:
    state: State
    marks: list[Mark]
    replay: Callable[[], None]
    outputs: Any
