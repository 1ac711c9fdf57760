"""A figure per function: acceptance and kinds. Each takes one run or several, and comes with its numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from specresearch.console import number as shown
from specresearch.report.subject import Subject
from specresearch.report.svg import WIDTH, Axes, chart, dot, frame, line, mark, rect, tag, text


@dataclass(frozen=True)
class Table:
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    words: Sequence[int] = ()  # columns of text


@dataclass(frozen=True)
class Figure:
    title: str
    svg: Markup
    note: str  # how to read it
    table: Table
    legend: Sequence[tuple[str, str]] = ()  # (class, words); a comparison's runs have one legend for all


def accepted_length(runs: Sequence[Subject]) -> Figure:
    """Share of the steps that emitted 1, 2, ... tokens."""
    shares = [_shares(run.summary["accepted_length_histogram"]) for run in runs]
    longest = max((k for share in shares for k in share), default=1)
    top = max((s for share in shares for s in share.values()), default=1.0)
    axes = Axes(x=(0.5, longest + 0.5), y=(0, top * 1.05))
    draw = _bars if len(runs) == 1 else _lines
    said = [f"{run.name}: mean {shown(run.summary['mean_accepted_length'])}" for run in runs]
    rows = [(k, *(f"{share.get(k, 0):.1%}" for share in shares)) for k in range(1, longest + 1)]
    return Figure(
        "Accepted length",
        chart(
            axes.height,
            f"Share of steps by tokens emitted. {'; '.join(said)}",
            frame(axes, "tokens emitted in a step", "share of steps", percent=True, x_ticks=_whole(1, longest)),
            *draw(axes, runs, shares, "emitted {k} tokens"),
        ),
        "Tokens a step emits, the bonus token included. 1 = every draft was rejected.",
        Table("Share of steps by accepted length", ("tokens", *_names(runs)), rows),
    )


def by_depth(runs: Sequence[Subject]) -> Figure:
    """Share of the steps that kept at least j drafted tokens."""
    rates = [dict(enumerate(run.summary["acceptance_rate_by_depth"], 1)) for run in runs]
    deepest = max((j for rate in rates for j in rate), default=1)
    axes = Axes(x=(0.6, deepest + 0.4))
    words = "depth {j} reached"
    shapes = _lines(axes, runs, rates, words.replace("{j}", "{k}"), "d-draft" if len(runs) == 1 else None)
    headings, columns, legend = [*_names(runs)], [*rates], []
    if len(runs) == 1:
        given = dict(enumerate(runs[0].summary["conditional_acceptance_rate_by_depth"], 1))
        shapes += _lines(axes, runs, [given], "depth {k}, given the one before", "d-draft hollow")
        headings, columns = ["of all steps", "given the depth before"], [*rates, given]
        legend = [("d-draft", "of all steps"), ("d-draft hollow", "given that the depth before was kept")]
    rows = [(j, *(_percent(column.get(j)) for column in columns)) for j in range(1, deepest + 1)]
    return Figure(
        "Acceptance by depth",
        chart(
            axes.height,
            "Share of steps that kept a draft at each depth",
            frame(axes, "depth in the tree", "acceptance", percent=True, x_ticks=_whole(1, deepest)),
            *shapes,
        ),
        "Steps that kept at least so many drafts. The sum over depths, plus one, is the accepted length.",
        Table("Acceptance by depth", ("depth", *headings), rows),
        legend,
    )


def by_rank(runs: Sequence[Subject]) -> Figure:
    """How often the first, second, ... child is the one that is kept."""
    rates = [{r: run.tally.taken[r] / n for r, n in sorted(run.tally.offered.items())} for run in runs]
    widest = max((r for rate in rates for r in rate), default=1)
    axes = Axes(x=(0.5, widest + 0.5), y=(0, max([1e-9, *(v for rate in rates for v in rate.values())]) * 1.05))
    draw = _bars if len(runs) == 1 else _lines
    rows = []
    for rank in range(1, widest + 1):
        cells = [(f"{run.tally.taken[rank]:,} of {run.tally.offered[rank]:,}", rate) for run, rate in zip(runs, rates)]
        rows.append((rank, *(f"{_percent(rate.get(rank))} ({count})" for count, rate in cells)))
    return Figure(
        "Acceptance by rank",
        chart(
            axes.height,
            "Share of children kept, by their rank among siblings",
            frame(axes, "rank among siblings", "acceptance", percent=True, x_ticks=_whole(1, widest)),
            *draw(axes, runs, rates, "child of rank {k} kept"),
        ),
        "Of the accepted nodes that had a child of this rank (in try order), the share whose child was kept.",
        Table("Acceptance by rank among siblings", ("rank", *_names(runs)), rows),
    )


def _bars(axes: Axes, runs: Sequence[Subject], series: Sequence[dict[int, float]], words: str) -> list[Markup]:
    wide = min(0.7 * (axes.px(1) - axes.px(0)), 40.0)
    bars = []
    for k, value in series[0].items():
        x, y = axes.px(k), axes.py(value)
        tip = f"{words.format(k=k)}: {value:.1%}".replace("1 tokens", "1 token")
        hit = rect(x - wide / 2, axes.top, wide, axes.height - axes.bottom - axes.top, "hit")
        seen = rect(x - wide / 2, y, wide, axes.height - axes.bottom - y, "fill")
        label = text(x, y - 4, f"{value:.0%}", "middle", "value") if wide >= 22 and value >= 0.005 else Markup("")
        bars.append(mark(tip, hit, seen, label, class_="d-draft"))
    return bars


def _lines(
    axes: Axes, runs: Sequence[Subject], series: Sequence[dict[int, float]], words: str, css: str | None = None
) -> list[Markup]:
    shapes = []
    for run, values in zip(runs, series):
        colour = css or run.css
        shapes.append(line(axes, [*values.items()], colour))
        for k, value in values.items():
            tip = f"{words.format(k=k)}: {value:.1%}".replace("1 tokens", "1 token")
            tip = tip if len(runs) == 1 else f"{run.name}, {tip}"
            shapes.append(dot(axes.px(k), axes.py(value), tip, colour, run.place if len(runs) > 1 else 0))
    return shapes


def kinds(runs: Sequence[Subject]) -> Figure:
    """Accepted length of each kind of prompt."""
    names = list(dict.fromkeys(kind for run in runs for kind in run.summary["by_kind"]))
    values = [run.summary["by_kind"][k]["mean_accepted_length"] for run in runs for k in run.summary["by_kind"]]
    high = max([v for v in values if v is not None], default=1.0)
    height = 46 + 22 * max(len(names), 1)
    axes = Axes(x=(1.0, max(high, 1.5) * 1.03), height=height, left=114)
    shapes = [frame(axes, "accepted length", y_ticks=[])]
    for row, kind in enumerate(names):
        y = 18 + 22 * row
        shapes.append(tag("line", x1=axes.left, x2=WIDTH - axes.right, y1=y, y2=y, class_="rule"))
        shapes.append(text(axes.left - 8, y + 3.5, kind if len(kind) <= 14 else kind[:13] + "…", "end", "tick"))
        for run in runs:
            own = run.summary["by_kind"].get(kind) or {}
            if (length := own.get("mean_accepted_length")) is not None:
                tip = f"{kind}: accepted length {length:.2f}, speedup {shown(own.get('speedup'), 2, '×')}"
                tip = tip if len(runs) == 1 else f"{run.name}, {tip}"
                css = "d-draft" if len(runs) == 1 else run.css
                shapes.append(dot(axes.px(length), y, tip, css, run.place if len(runs) > 1 else 0))
    return Figure(
        "By kind of prompt",
        chart(height, "Accepted length by kind of prompt", *shapes),
        "1 = no better than plain decoding.",
        kind_table(runs, names),
    )


def kind_table(runs: Sequence[Subject], names: Sequence[str]) -> Table:
    if len(runs) > 1:
        cells = [[run.summary["by_kind"].get(kind, {}) for run in runs] for kind in names]
        rows = [(kind, *(_length_and_gain(own) for own in row)) for kind, row in zip(names, cells)]
        return Table("Accepted length (speedup) by kind of prompt", ("kind", *_names(runs)), rows)
    own = runs[0].summary["by_kind"]
    keys = ("prompts", "tokens", "steps")
    rows = [
        (k, *(f"{v[key]:,}" for key in keys), shown(v["mean_accepted_length"]), shown(v["speedup"], 2, "×"))
        for k, v in own.items()
    ]
    return Table("By kind of prompt", ("kind", "answers", "tokens", "steps", "accepted length", "speedup"), rows)


def _length_and_gain(own: dict[str, Any]) -> str:
    gain = own.get("speedup")
    return shown(own.get("mean_accepted_length")) + (f" ({gain:.2f}×)" if gain else "")


def _shares(histogram: dict[str, int]) -> dict[int, float]:
    total = sum(histogram.values())
    return {int(k): n / total for k, n in histogram.items()}


def _whole(low: int, high: int) -> list[float]:
    step = max(1, -(-(high - low + 1) // 12))
    return [float(k) for k in range(low, high + 1, step)]


def _names(runs: Sequence[Subject]) -> list[str]:
    return ["share"] if len(runs) == 1 else [run.name for run in runs]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
