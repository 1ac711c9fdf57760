"""Figures of time, speed and evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from specresearch.console import number as shown
from specresearch.lossless.blackbox import BlackBox
from specresearch.report.figures import Figure, Table
from specresearch.report.subject import Subject
from specresearch.report.svg import WIDTH, Axes, chart, dot, frame, line, mark, path, rect, tag, text, ticks
from specresearch.report.tally import PARTS, decode_cost, part_seconds, step_times

Bar = tuple[str, dict[str, float]]  # its name, and its parts
LEGEND = [(f"p-{part}", part) for part in PARTS]


def parts(runs: Sequence[Subject]) -> Figure:
    """Where the time of a step went; of several runs, the time of an emitted token."""
    if len(runs) == 1:
        unit, rows = "ms per target pass", _passes(runs[0])
    else:
        unit, rows = "ms per emitted token", [(run.name, _per_token(run)) for run in runs]
    return Figure(
        f"Time, in {unit}",
        _stacked(rows, unit),
        "Stacked by part, the prompts' time spread over all steps. draft: every pass of the drafter; commit: moving "
        "the cache.",
        Table(f"Time by part, {unit}", ("", *PARTS, "sum"), [(name, *_cells(own)) for name, own in rows]),
        LEGEND,
    )


def _passes(run: Subject) -> list[Bar]:
    """All blocks, then each kind that has blocks of its own."""
    blocks = run.results.blocks
    pure = {k: [b for b in blocks if b["kinds"] == [k]] for k in run.summary["by_kind"]}
    groups = {"all": blocks} | ({k: own for k, own in pure.items() if own} if len(pure) > 1 else {})
    return [(name, _milliseconds(own)) for name, own in groups.items()]


def _milliseconds(blocks: Sequence[dict[str, object]]) -> dict[str, float]:
    passes = sum(block["speculative"]["target_passes"] for block in blocks)  # type: ignore[index]
    return {part: 1e3 * s / max(passes, 1) for part, s in part_seconds(blocks).items()}


def _per_token(run: Subject) -> dict[str, float]:
    tokens = max(run.summary["tokens"], 1)
    return {part: 1e3 * run.summary["time"].get(part, 0.0) / tokens for part in PARTS}


def _cells(own: dict[str, float]) -> list[str]:
    return [*(shown(own[part], 2) for part in PARTS), shown(sum(own.values()), 2)]


def _stacked(rows: Sequence[Bar], x_label: str) -> Markup:
    high = max([1e-9, *(sum(own.values()) for _, own in rows)])
    step = 38
    height = 44 + step * len(rows)
    axes = Axes(x=(0, high * 1.02), height=height, left=2, right=4)
    shapes = [frame(axes, x_label, y_ticks=[])]
    for row, (name, own) in enumerate(rows):
        y, x = 18 + step * row, 0.0
        shapes.append(text(axes.left, y - 4, name[:58], "start", "tick"))
        shapes.append(text(WIDTH - axes.right, y - 4, f"{sum(own.values()):.4g}", "end", "value"))
        for part, value in own.items():
            shapes.append(_segment(axes, x, value, y, f"{name}, {part}: {value:.3g} {x_label.split(' per')[0]}", part))
            x += value
    return chart(height, f"Stacked bars: {x_label}", *shapes)


def _segment(axes: Axes, start: float, value: float, y: float, tip: str, part: str) -> Markup:
    x, wide = axes.px(start), axes.px(start + value) - axes.px(start)
    return mark(tip, rect(x, y, wide, 15, "fill seam"), class_=f"p-{part}") if wide >= 0.4 else Markup("")


def steps_over_time(runs: Sequence[Subject]) -> Figure:
    """Milliseconds of the steps in the trace's order: medians, and for a single run the middle eight tenths."""
    series = [step_times(run.lines, 90 if len(runs) == 1 else 45) for run in runs]
    last = max([2.0, *(each[-1].step for each in series if each)])
    high = max([1e-9, *(b.high if len(runs) == 1 else b.middle for each in series for b in each)])
    axes = Axes(x=(1, last), y=(0, high * 1.05))
    shapes = [frame(axes, "step of the run", "ms per step")]
    for run, bins in zip(runs, series):
        css = "d-target" if len(runs) == 1 else run.css
        if len(runs) == 1 and len(bins) > 1:
            band = [(b.step, b.low) for b in bins] + [(b.step, b.high) for b in reversed(bins)]
            shapes.append(path([(axes.px(x), axes.py(y)) for x, y in band], f"band {css}", closed=True))
        shapes.append(line(axes, [(b.step, b.middle) for b in bins], css))
        for b in bins:
            who = "" if len(runs) == 1 else f"{run.name}, "
            tip = f"{who}around step {b.step:.0f}: median {b.middle:.1f} ms, {b.low:.1f} to {b.high:.1f} of {b.count} steps"
            spot = tag("circle", cx=axes.px(b.step), cy=axes.py(b.middle), r=2.2, class_="dot")
            column = rect(axes.px(b.step) - 2, axes.top, 4, axes.height - axes.bottom - axes.top, "hit")
            shapes.append(mark(tip, column, spot, class_=css))
    thin = [(run, b) for run, each in zip(runs, series) for b in each[:: max(1, len(each) // 12)]]
    rows = [(run.name, f"{b.step:.0f}", *(shown(v, 1) for v in (b.low, b.middle, b.high))) for run, b in thin]
    return Figure(
        "Time of the steps",
        chart(axes.height, "Milliseconds of the steps over the run", *shapes),
        "Medians of consecutive steps" + (", and the band that holds eight of ten." if len(runs) == 1 else "."),
        Table("Milliseconds per step, some places", ("run", "step", "a tenth below", "median", "a tenth above"), rows),
    )


def yields(run: Subject) -> Figure | None:
    """What a step costs in plain decoding's time per token, above what it yields; None without a timed baseline."""
    cost = decode_cost(run.results.blocks, run.summary["steps"])
    length = run.summary["mean_accepted_length"]
    if cost is None or not length:
        return None
    total, rates = sum(cost.values()), run.summary["acceptance_rate_by_depth"]
    axes = Axes(x=(0, max(total, length) * 1.02), height=144, left=2, right=4, top=2)
    shapes = [frame(axes, "tokens of plain decoding", y_ticks=[])]
    shapes += [text(2, 14, "a step costs", "start", "tick"), text(WIDTH - 4, 14, shown(total), "end", "value")]
    x = 0.0
    for part, value in cost.items():
        shapes.append(_segment(axes, x, value, 18, f"cost of {part}: {value:.3f} plain tokens", part))
        x += value
    shapes += [text(2, 62, "and yields", "start", "tick"), text(WIDTH - 4, 62, shown(length), "end", "value")]
    gains = [("target", 1.0, "bonus token: 1")]
    gains += [("draft", s, f"drafts kept at depth {j}: {s:.3f}") for j, s in enumerate(rates, 1)]
    x = 0.0
    for part, value, tip in gains:
        shapes.append(_segment(axes, x, value, 66, tip, part))
        x += value
    identity = " + ".join(["1", *(f"{s:.3f}" for s in rates)])
    rows = [*((f"cost of {part}", shown(v, 3)) for part, v in cost.items()), ("cost of a step", shown(total, 3))]
    rows += [("yield, 1 + sum of S_j", f"{identity} = {1 + sum(rates):.3f}"), ("accepted length, counted", shown(length, 3))]
    rows += [("yield / cost", shown(length / total, 3, "×"))]
    return Figure(
        "What a step costs and yields",
        chart(axes.height, f"A step costs {total:.2f} plain tokens and yields {length:.2f}", *shapes),
        f"In units of plain decoding's time per token, prompts left out: {length:.2f} / {total:.2f} = "
        f"{length / total:.2f}×. The yield is 1 for the bonus and S_j for each depth: E = 1 + ΣS_j.",
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
    high = max([1.0, *(y for _, _, y in known)])
    axes = Axes(x=(1, max([1.5, *(x for _, x, _ in known)]) * 1.05), y=(0, high * 1.12), height=300)
    shapes = [frame(axes, "accepted length", label)]
    if relative:
        even = tag("line", x1=axes.left, x2=WIDTH - axes.right, y1=axes.py(1), y2=axes.py(1), class_="threshold")
        shapes += [even, text(WIDTH - axes.right, axes.py(1) + 13, "plain decoding", "end", "tick")]
    taken: list[float] = []
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


def _label(axes: Axes, x: float, y: float, run: Subject, taken: list[float]) -> Markup:
    """Beside its point, moved down where another label stands."""
    at = axes.py(y) + 3.5
    while any(abs(at - other) < 11 for other in taken):
        at += 2
    taken.append(at)
    right = axes.px(x) > WIDTH * 0.62
    words = run.name if len(run.name) <= 30 else run.name[:29] + "…"
    return text(axes.px(x) + (-9 if right else 9), at, words, "end" if right else "start", f"value {run.css}")


def evidence(runs: Sequence[Subject]) -> Figure | None:
    """log10 E over the judged tokens, with the line that means a violation; None where nothing was sampled."""
    judged = [(run, *_curve(run)) for run in runs]
    judged = [(run, curve, alpha) for run, curve, alpha in judged if curve]
    if not judged:
        return None
    bar = max(math.log10(1 / alpha) for _, _, alpha in judged)
    values = [e for _, curve, _ in judged for _, e in curve]
    low, high = min([-1.0, *values]), max([bar * 1.15, *values])
    axes = Axes(x=(0, max(n for _, curve, _ in judged for n, _ in curve)), y=(low, high))
    y = axes.py(bar)
    shapes = [frame(axes, "tokens judged", "log₁₀ E", x_ticks=ticks(0, axes.x[1], 4))]
    shapes.append(tag("line", x1=axes.left, x2=WIDTH - axes.right, y1=y, y2=y, class_="threshold bad"))
    shapes.append(text(WIDTH - axes.right, y - 5, "violation from here on: E ≥ 1/α", "end", "tick"))
    for run, curve, _ in judged:
        css = "d-ink" if len(runs) == 1 else run.css
        shapes.append(line(axes, [(0, 0.0), *curve], css))
        for n, e in curve[:: max(1, len(curve) // 60)]:
            tip = f"{'' if len(runs) == 1 else run.name + ', '}after {n:,} tokens: log10 E = {e:.2f}"
            shapes.append(dot(axes.px(n), axes.py(e), tip, css, run.place if len(runs) > 1 else 0))
    rows = [(run.name, f"{n:,}", f"{e:.3f}") for run, curve, _ in judged for n, e in curve[:: max(1, len(curve) // 20)]]
    return Figure(
        "Evidence against the output's law",
        chart(axes.height, "log10 E over the tokens judged, and the threshold of a violation", *shapes),
        "E is the wealth of bets that the tokens do not follow the target. If they do, it reaches 1/α with probability α "
        "at most, however often one looks.",
        Table("log10 E by tokens judged", ("run", "tokens", "log10 E"), rows),
    )


def _curve(run: Subject) -> tuple[list[tuple[int, float]], float]:
    """The blocks' evidence, pooled in the order in which the run pooled it."""
    found = run.summary["lossless"]
    box = BlackBox(alpha=found.get("alpha") or 1e-3, tolerance=found.get("tolerance") or 0.0)
    for block in run.results.blocks:
        if state := block.get("evidence"):
            box.merge(BlackBox(alpha=box.alpha, tolerance=box.tolerance).load(state))
    return box.curve, box.alpha
