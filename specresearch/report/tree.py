"""The drafted tree, drawn with what became of its nodes over all steps."""

from __future__ import annotations

from collections.abc import Sequence

from specresearch.report.figures import Figure, Table
from specresearch.report.subject import Subject
from specresearch.report.svg import Axes, chart, mark, tag, text
from specresearch.report.tally import Ranks, likeliest

NODES = 40  # that are drawn


def tree(run: Subject) -> Figure:
    """Every node by its path of ranks: how often it was drafted (the edge) and kept (the disc)."""
    nodes, steps = likeliest(run.tally, NODES), max(run.tally.steps, 1)
    rows = _layout(nodes)
    deepest = max((len(node) for node in nodes), default=1)
    height = int(34 + 17 * max([1.0, *(row + 1 for row in rows.values())]))
    axes = Axes(x=(0, deepest), y=(0, 1), height=height, left=14, right=46)

    def at(node: Ranks) -> tuple[float, float]:
        return axes.px(len(node)), 30 + 17 * rows[node]

    edges, discs = [], []
    for node in nodes:
        kept, drafted = run.tally.accepted[node] / steps, run.tally.drafted[node] / steps
        (x, y), (x0, y0) = at(node), at(node[:-1])
        middle = (x0 + x) / 2
        curve = f"M{x0:.1f} {y0:.1f} C{middle:.1f} {y0:.1f} {middle:.1f} {y:.1f} {x:.1f} {y:.1f}"
        edges.append(tag("path", d=curve, class_="edge", style=f"stroke-width:{0.6 + 3 * drafted:.2f}"))
        name = "child " + " › ".join(map(str, node))
        tip = f"{name}: kept in {kept:.1%} of all steps; drafted in {drafted:.1%}, kept there {kept / drafted:.1%}"
        shown = text(x + 9, y + 3.5, f"{kept:.0%}" if kept >= 0.005 else "·", "start", "value")
        seen = tag("circle", cx=x, cy=y, r=5.5, class_="node", style=f"--a:{min(1.0, kept * 1.6) ** 0.6:.3f}")
        discs.append(mark(tip, tag("circle", cx=x, cy=y, r=8.5, class_="hit"), seen, shown, class_="d-draft"))
    heads = [text(axes.px(d), 14, "root" if d == 0 else str(d), "middle", "tick") for d in range(deepest + 1)]
    root = tag("circle", cx=at(())[0], cy=at(())[1], r=5.5, class_="root")
    left_out = len(run.tally.drafted) - len(nodes)
    return Figure(
        "The tree, as it was accepted",
        chart(height, f"The drafted tree, {len(nodes)} nodes", *heads, *edges, root, *discs),
        "Columns are depths, siblings stand in try order. The number, and the depth of colour, is the share of all steps "
        "that kept the node; the width of its edge, the share that drafted it."
        + (f" The {NODES} nodes kept most often, {left_out:,} more not drawn." if left_out else ""),
        Table(
            "Nodes of the tree by path of ranks",
            ("node", "kept, of all steps", "drafted, of all steps"),
            [(" › ".join(map(str, n)), *_both(run, n, steps)) for n in sorted(nodes)],
        ),
    )


def _both(run: Subject, node: Ranks, steps: int) -> tuple[str, str]:
    return f"{run.tally.accepted[node] / steps:.1%}", f"{run.tally.drafted[node] / steps:.1%}"


def _layout(nodes: Sequence[Ranks]) -> dict[Ranks, float]:
    """A row for each leaf; a parent stands level with its first child, so that the first ranks make a straight line."""
    children: dict[Ranks, list[Ranks]] = {}
    for node in sorted(nodes):
        children.setdefault(node[:-1], []).append(node)
    rows: dict[Ranks, float] = {}
    free = 0
    for node in [(), *sorted(nodes)]:  # depth first
        parent = node[:-1]
        first = bool(node) and children[parent][0] == node
        if node and not first:
            free += 1
        rows[node] = float(free)
    return rows
