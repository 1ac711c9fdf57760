"""The evidence against a sampled output's law, as it grew."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specresearch.lossless.blackbox import BlackBox
from specresearch.report.figures import Figure, Table
from specresearch.report.subject import Subject
from specresearch.report.svg import WIDTH, Axes, chart, dot, frame, line, tag, text, ticks


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
