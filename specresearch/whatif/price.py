"""What a step costs, from a run's own clock: the target's pass by tree size, the drafter's by level, the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specresearch.metrics import Block
from specresearch.results import Results
from specresearch.whatif.walk import Walk


@dataclass(frozen=True)
class Prices:
    """Seconds. `source` says where the target's come from, and how far they can be trusted."""

    target: dict[float, float]  # of a pass, by nodes in each row's tree
    level: float  # of drafting one level in one pass
    rest: float  # verify, commit and other of one pass
    prefill: float  # of all answers
    passes_per_step: float  # below 1 with several rows
    trims: bool  # trees are cut to a power of two behind their last node, as prompt lookup does
    source: str
    # Of a pass without the target's part, by most children of a node and by depth, where that was measured; `level` and
    # `rest` are then left aside.
    beside: Mapping[int, Mapping[int, float]] = field(default_factory=dict)

    def width(self, nodes: int, size: int) -> int:
        return min(size, 1 << (nodes - 1).bit_length()) if self.trims else size

    def seconds(self, walk: Walk, size: int, depth: int, width: int) -> float:
        steps = sum(n * by_size(self.target, self.width(k, size)) for k, n in walk.sizes.items())
        return self.prefill + (steps + walk.steps * self.drafting(depth, width)) * self.passes_per_step

    def drafting(self, depth: int, width: int) -> float:
        """Of a pass without the target's part, for a tree of this depth with at most `width` children per node."""
        if not self.beside:
            return depth * self.level + self.rest
        return by_size({children: by_size(table, depth) for children, table in self.beside.items()}, width)


def by_size(table: Mapping[Any, float], nodes: float) -> float:
    """Piecewise linear; beyond the largest size along the last piece, and never below its time."""
    sizes = sorted(table)
    if len(sizes) == 1 or nodes <= sizes[0]:
        return table[sizes[0]]
    left, right = next((pair for pair in pairwise(sizes) if nodes <= pair[1]), (sizes[-2], sizes[-1]))
    slope = (table[right] - table[left]) / (right - left)
    return table[right] + (max(slope, 0.0) if nodes > right else slope) * (nodes - right)


def prices_of(run: Results, depth: int, size: int) -> Prices | None:
    """`depth`, `size`: of the run's own tree. None where the run measured nothing."""
    summary = run.summary
    steps, passes, time = summary["steps"], summary["target_passes"], summary["time"]
    if not steps or not passes:
        return None
    widths = [len(step["tokens"]) for line in run.lines for step in line["steps"]]
    target, source = target_prices(summary, run.blocks, widths, time["target"] / passes, steps / passes)
    rest = (time["verify"] + time["commit"] + time["other"]) / passes
    level = time["draft"] / passes / depth
    return Prices(target, level, rest, time["prefill"], passes / steps, min(widths) < size, source)


def target_prices(
    summary: dict[str, Any], blocks: Sequence[Block], widths: Sequence[int], own: float, rows: float = 1.0
) -> tuple[dict[float, float], str]:
    """`own`: seconds of this run's passes, `widths` nodes wide in each of `rows` rows (on average)."""
    measured = {int(n) / rows: float(s) for n, s in ((summary.get("costs") or {}).get("target") or {}).items()}
    if measured:
        scale = own / mean(widths, lambda nodes: by_size(measured, nodes))
        table = {nodes: seconds * scale for nodes, seconds in measured.items()}
        return table, f"passes measured by tree size, scaled by {scale:.2f} to what they took in the run"
    plain = [block["baseline"] for block in blocks if "baseline" in block]
    passes, wide = sum(p["target_passes"] for p in plain), mean(widths, float)
    if not passes or wide <= 1:
        return {round(wide): own}, "passes of the run's own size alone, so every size is taken to cost the same"
    one = sum(p["time"]["target"] for p in plain) / passes
    most = max(widths)
    table = {1: one, most: one + (own - one) / (wide - 1) * (most - 1)}
    return table, f"passes of plain decoding and of the run's own (1 and {wide:.0f} nodes), a straight line between"


def mean(values: Sequence[int], of: Callable[[int], float]) -> float:
    return sum(map(of, values)) / len(values)
