"""Figures of time: by part, and step by step."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from specresearch.console import number as shown
from specresearch.report.figures import Figure, Table
from specresearch.report.subject import Subject
from specresearch.report.svg import WIDTH, Axes, chart, frame, line, mark, path, rect, tag, text
from specresearch.report.tally import PARTS, part_seconds, step_times

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
        shapes.append(text(axes.left, y - 4, name if len(name) <= 44 else name[:43] + "…", "start", "tick"))
        shapes.append(text(WIDTH - axes.right, y - 4, f"{sum(own.values()):.4g}", "end", "value"))
        for part, value in own.items():
            shapes.append(segment(axes, x, value, y, f"{name}, {part}: {value:.3g} {x_label.split(' per')[0]}", part))
            x += value
    return chart(height, f"Stacked bars: {x_label}", *shapes)


def segment(axes: Axes, start: float, value: float, y: float, tip: str, part: str) -> Markup:
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
