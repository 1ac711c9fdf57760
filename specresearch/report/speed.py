"""Figures of speed: what a step costs and yields, what a pass costs, and how runs compare."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from specresearch.console import number as shown
from specresearch.report.figures import Figure, Table
from specresearch.report.subject import Subject
from specresearch.report.svg import WIDTH, Axes, chart, dot, frame, line, tag, text
from specresearch.report.tally import decode_cost
from specresearch.report.timing import LEGEND, segment


def yields(run: Subject) -> Figure | None:
    """What a step costs in plain decoding's time per token, above what it yields; None without a timed baseline."""
    cost = decode_cost(run.results.blocks, run.summary["steps"])
    length = run.summary["mean_accepted_length"]
    if cost is None or not length:
        return None
    total, rates = sum(cost.values()), run.summary["acceptance_rate_by_depth"]
    axes = Axes(x=(0, max(total, length) * 1.02), height=144, left=2, right=4)
    shapes = [frame(axes, "tokens of plain decoding", y_ticks=[])]
    shapes += [text(2, 14, "a step costs", "start", "tick"), text(WIDTH - 4, 14, shown(total), "end", "value")]
    x = 0.0
    for part, value in cost.items():
        shapes.append(segment(axes, x, value, 18, f"cost of {part}: {value:.3f} plain tokens", part))
        x += value
    shapes += [text(2, 62, "and yields", "start", "tick"), text(WIDTH - 4, 62, shown(length), "end", "value")]
    gains = [("target", 1.0, "bonus token: 1")]
    gains += [("draft", s, f"drafts kept at depth {j}: {s:.3f}") for j, s in enumerate(rates, 1)]
    x = 0.0
    for part, value, tip in gains:
        shapes.append(segment(axes, x, value, 66, tip, part))
        x += value
    identity = " + ".join(["1", *(f"{s:.3f}" for s in rates)])
    rows = [*((f"cost of {part}", shown(v, 3)) for part, v in cost.items()), ("cost of a step", shown(total, 3))]
    rows += [("yield, 1 + ΣSⱼ", f"{identity} = {1 + sum(rates):.3f}"), ("accepted length, counted", shown(length, 3))]
    rows += [("yield / cost", shown(length / total, 3, "×"))]
    return Figure(
        "What a step costs and yields",
        chart(axes.height, f"A step costs {total:.2f} plain tokens and yields {length:.2f}", *shapes),
        f"In units of plain decoding's time per token, prompts left out: {length:.2f} / {total:.2f} = "
        f"{length / total:.2f}×. The yield is 1 for the bonus and Sⱼ for each depth: E = 1 + ΣSⱼ.",
        Table("Cost and yield of a step, in plain tokens", ("", "plain tokens"), rows),
        [*LEGEND[1:3], ("p-verify", "verify"), ("p-commit", "commit"), ("p-other", "other")],
    )


def pass_costs(runs: Sequence[Subject]) -> Figure | None:
    """Measured milliseconds of a target pass by its number of tokens; None where no run measured them."""
    costs = [((run.summary.get("costs") or {}).get("target") or {}) for run in runs]
    curves = [sorted((int(n), 1e3 * float(s)) for n, s in own.items()) for own in costs]
    if not any(curves):
        return None
    sizes = sorted({n for curve in curves for n, _ in curve})
    axes = Axes(x=(min(0, sizes[0]), sizes[-1] + 1), y=(0, 1.05 * max(ms for curve in curves for _, ms in curve)))
    shapes = [frame(axes, "tokens in the pass", "ms")]
    for run, curve in zip(runs, curves):
        css = "d-target" if len(runs) == 1 else run.css
        shapes.append(line(axes, curve, css))
        for n, ms in curve:
            tip = f"{'' if len(runs) == 1 else run.name + ', '}a pass over {n} tokens: {ms:.1f} ms"
            shapes.append(dot(axes.px(n), axes.py(ms), tip, css, run.place if len(runs) > 1 else 0))
    rows = [(n, *(shown(dict(curve).get(n), 2) for curve in curves)) for n in sizes]
    return Figure(
        "Cost of a target pass",
        chart(axes.height, "Milliseconds of a target pass by its number of tokens", *shapes),
        "Measured after the run. The flatter, the cheaper are large trees.",
        Table("Milliseconds of a target pass", ("tokens", *(run.name for run in runs)), rows),
    )


def speed_and_length(runs: Sequence[Subject]) -> Figure:
    """One point a run: right is more accepted, up is faster."""
    relative = all(run.summary.get("speedup") for run in runs)
    key, label, unit = ("speedup", "speedup", "×") if relative else ("tokens_per_second", "tokens/s", " tokens/s")
    points = [(run, run.summary["mean_accepted_length"], run.summary.get(key)) for run in runs]
    known = [(run, float(x), float(y)) for run, x, y in points if x is not None and y is not None]
    heights = [y for _, _, y in known] + ([1.0] if relative or not known else [])
    room = 0.15 * (max(heights) - min(heights)) or 0.1 * max(heights)
    axes = Axes(
        x=(1, max([1.5, *(x for _, x, _ in known)]) * 1.05),
        y=(max(0.0, min(heights) - room), max(heights) + room),
        height=300,
    )
    shapes = [frame(axes, "accepted length", label)]
    if relative:
        even = tag("line", x1=axes.left, x2=WIDTH - axes.right, y1=axes.py(1), y2=axes.py(1), class_="threshold")
        shapes += [even, text(WIDTH - axes.right, axes.py(1) + 13, "plain decoding", "end", "tick")]
    taken: list[tuple[float, float]] = []
    for run, x, y in sorted(known, key=lambda point: -point[2]):
        tip = f"{run.name}: accepted length {x:.2f}, {label} {y:.2f}{unit}"
        shapes.append(dot(axes.px(x), axes.py(y), tip, run.css, run.place))
        if len(runs) <= 12:
            shapes.append(_label(axes, x, y, run, taken))
    rows = [(run.name, shown(x), shown(y, 2)) for run, x, y in points]
    return Figure(
        "Speed against accepted length",
        chart(axes.height, f"{label} against accepted length, a point for each run", *shapes),
        "A run that lies low for its accepted length pays much for each step.",
        Table("Speed and accepted length", ("run", "accepted length", label), rows),
    )


def _label(axes: Axes, x: float, y: float, run: Subject, taken: list[tuple[float, float]]) -> Markup:
    """Beside its point, moved down where another label stands."""
    words = run.name if len(run.name) <= 30 else run.name[:29] + "…"
    right, wide, at = axes.px(x) > WIDTH * 0.62, 6.0 * len(words), axes.py(y) + 3.5
    start = axes.px(x) - 9 - wide if right else axes.px(x) + 9
    while any(abs(at - other) < 12 and abs(start - begin) < 6.0 * 30 for begin, other in taken):
        at += 2
    taken.append((start, at))
    return text(axes.px(x) + (-9 if right else 9), at, words, "end" if right else "start", f"value {run.css}")
