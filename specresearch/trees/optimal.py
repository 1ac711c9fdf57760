"""Sequoia's optimal static tree (Chen et al. 2024, arXiv:2402.12374) for a table of acceptance by depth and rank."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specresearch.trees.growth import positive
from specresearch.trees.static import StaticTree
from specresearch.types import UserError

Table = Sequence[Sequence[float]]  # [depth - 1][rank]: P(this child is the one accepted | its parent was)


class OptimalTree(StaticTree):
    """The shape with the most expected tokens per second: E(tree) / cost(tree), over all sizes up to `size`.

    E is the sum over nodes of the product of acceptances along the path, so for one size the best tree takes the most
    probable paths first. `cost` is the time of a target pass by tree size, in units of the size-1 pass: measured on the
    target when null. `draft_cost` is the cost of one drafted level in the same units.
    """

    def __init__(
        self,
        *,
        size: int,
        depth: int,
        temperature: float,
        acceptance: Table | None = None,
        trace: str | None = None,
        cost: Mapping[int, float] | None = None,
        draft_cost: float = 0.0,
        draw: str | None = None,
    ):
        positive(size=size, depth=depth)
        if (acceptance is None) == (trace is None):
            raise UserError(
                "tree=optimal needs tree.acceptance=[[0.6,0.2],[0.5,0.1]] or tree.trace=RUN_DIR/trace.jsonl"
            )
        table = acceptance if acceptance is not None else acceptance_of_trace(Path(str(trace)))
        if not is_table(table):
            raise UserError(
                "tree.acceptance lists, for each level, probabilities by rank that add up to at most 1, "
                f"e.g. [[0.6,0.2],[0.5,0.1]]; it is {table}"
            )
        if cost is not None and not (
            isinstance(cost, Mapping) and cost and all(map(is_positive, [*cost, *cost.values()]))
        ):
            raise UserError(f"tree.cost={cost}: use sizes and positive times, e.g. {{1:1,8:1.2,16:1.5}}")
        if not is_positive(draft_cost) and draft_cost != 0:
            raise UserError(f"tree.draft_cost={draft_cost}: use 0 or a positive number")
        self.table, self.limit = [list(row) for row in table][:depth], size
        self.cost, self.draft_cost = cost, draft_cost
        super().__init__(temperature=temperature, draw=draw, parents=best_parents(self.table, size)[0])

    def prepare(self, seconds: Callable[[int], float]) -> None:
        cost = self.cost or measured_cost(seconds, self.limit)
        self.shape(fastest_parents(self.table, self.limit, cost, self.draft_cost))


def is_positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")


def is_table(table: object) -> bool:
    if not isinstance(table, list | tuple) or not all(isinstance(row, list | tuple) for row in table):
        return False
    return all(a == 0 or (is_positive(a) and a <= 1) for row in table for a in row) and all(
        sum(row) <= 1 + 1e-9 for row in table
    )


def best_parents(table: Table, size: int) -> tuple[list[int], list[float]]:
    """The `size` most probable paths -> parent pointers, and each node's path probability (root 1)."""
    parents, value, rank, depth = [-1], [1.0], [0], [0]
    heap: list[tuple[float, int, int]] = []  # (-value, parent, rank): the next child to try

    def offer(parent: int, position: int) -> None:
        row = table[depth[parent]] if depth[parent] < len(table) else []
        if position < len(row) and row[position] > 0:
            heapq.heappush(heap, (-value[parent] * row[position], parent, position))

    offer(0, 0)
    while heap and len(parents) < size:
        worth, parent, position = heapq.heappop(heap)
        parents.append(parent)
        value.append(-worth)
        rank.append(position)
        depth.append(depth[parent] + 1)
        offer(parent, position + 1)
        offer(len(parents) - 1, 0)
    return parents, value


def fastest_parents(table: Table, size: int, cost: Mapping[int, float], draft_cost: float) -> list[int]:
    """Try every depth and size, keep the tree of most expected tokens per unit of cost."""
    best, shape = 0.0, [-1]
    for depth in range(len(table) + 1):
        parents, value = best_parents(table[:depth], size)
        for nodes in range(1, len(parents) + 1):
            rate = sum(value[:nodes]) / (interpolate(cost, nodes) + depth * draft_cost)
            if rate > best + 1e-12:
                best, shape = rate, parents[:nodes]
    return shape


def interpolate(cost: Mapping[int, float], nodes: float) -> float:
    """Piecewise linear between the sizes that were measured, flat beyond them."""
    sizes = sorted(int(k) for k in cost)
    below = max((s for s in sizes if s <= nodes), default=sizes[0])
    above = min((s for s in sizes if s >= nodes), default=sizes[-1])
    share = (nodes - below) / (above - below) if above > below else 0.0
    return cost[below] * (1 - share) + cost[above] * share


def sizes_to_measure(size: int) -> list[int]:
    return sorted({1, size, *(2**k for k in range(1, 10) if 2**k < size)})


def measured_cost(seconds: Callable[[int], float], size: int) -> dict[int, float]:
    """Of a pass by its nodes, in passes over one; more nodes never cost less, whatever was measured."""
    times = {n: seconds(n) for n in sizes_to_measure(size)}
    return {n: max(t for m, t in times.items() if m <= n) / times[1] for n in times}


def acceptance_of_trace(path: Path) -> list[list[float]]:
    """Count, in an earlier run's trace, how often the child of each rank was accepted where its parent was."""
    tried: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"tree.trace={path} cannot be read ({error.strerror}): give the trace.jsonl of a run") from None
    try:
        read = [json.loads(line) for line in lines if line]
        steps = [step for line in read for step in line["steps"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"tree.trace={path} is no trace: give the trace.jsonl of a run") from None
    if any("simulated" in line for line in read):
        raise UserError(f"tree.trace={path} was simulated: give a trace of a run whose drafter really drafted")
    for step in steps:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(step["parent"]):
            if parent >= 0 and step["tokens"][node] >= 0:
                children.setdefault(parent, []).append(node)
        path_nodes = step["path"]
        for depth, node in enumerate(path_nodes):
            kids = children.get(node, [])
            after = path_nodes[depth + 1] if depth + 1 < len(path_nodes) else None
            for rank, kid in enumerate(kids):
                tried[depth, rank] += 1
                taken[depth, rank] += kid == after
    if not tried:
        raise UserError(f"tree.trace={path} holds no drafted tree: make it with a drafter and a wide tree")
    levels = 1 + max(depth for depth, _ in tried)
    table = []
    for level in range(levels):
        ranks = [r for d, r in tried if d == level]
        row = [taken[level, r] / tried[level, r] for r in range(max(ranks) + 1)] if ranks else []
        table.append(sorted(row, reverse=True))
    return table
