"""Charts as SVG text, drawn once in Python: no script is needed to see them, and colours follow the page's theme.

A mark is something that can be pointed at: its `tip` is shown on hover and on focus, and read aloud. All charts are
`WIDTH` units wide, about the width of a phone, so that their letters have the same size everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 360


@dataclass(frozen=True)
class Axes:
    """Where values fall on the paper. The frame is what is left inside the margins."""

    x: tuple[float, float]
    y: tuple[float, float] = (0.0, 1.0)
    height: int = 230
    left: int = 42
    right: int = 12
    top: int = 26  # room for the name of the y axis, and for a bar's own number
    bottom: int = 38

    def px(self, value: float) -> float:
        low, high = self.x
        return self.left + (value - low) / ((high - low) or 1) * (WIDTH - self.left - self.right)

    def py(self, value: float) -> float:
        low, high = self.y
        return self.height - self.bottom - (value - low) / ((high - low) or 1) * (self.height - self.top - self.bottom)


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element; everything that is no Markup is escaped. `class_` is class, `data_tip` is data-tip."""
    given = (
        (key.rstrip("_").replace("_", "-"), _text(value)) for key, value in attributes.items() if value is not None
    )
    opening = Markup("").join(Markup(' {}="{}"').format(key, value) for key, value in given)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), opening, Markup("").join(map(escape, children)))


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, anchor: str = "start", class_: str | None = None) -> Markup:
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str | None = None) -> Markup:
    return tag("rect", x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), class_=class_)


def path(points: Sequence[tuple[float, float]], class_: str, closed: bool = False) -> Markup:
    steps = " ".join(f"{'ML'[i > 0]}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    return tag("path", d=steps + (" Z" if closed else ""), class_=class_)


def mark(tip: str, *shapes: Markup, class_: str = "") -> Markup:
    return tag("g", *shapes, class_=f"mark {class_}".strip(), tabindex=-1, role="img", aria_label=tip, data_tip=tip)


def dot(x: float, y: float, tip: str, class_: str, shape: int = 0) -> Markup:
    """A point that is easy to hit; `shape` 0, 1, 2 tells series apart without colour."""
    r = 4.0
    if shape % 3 == 1:
        seen = rect(x - r, y - r, 2 * r, 2 * r, "dot")
    elif shape % 3 == 2:
        seen = path([(x, y - 1.3 * r), (x + 1.3 * r, y), (x, y + 1.3 * r), (x - 1.3 * r, y)], "dot", closed=True)
    else:
        seen = tag("circle", cx=x, cy=y, r=r, class_="dot")
    return mark(tip, tag("circle", cx=x, cy=y, r=11, class_="hit"), seen, class_=class_)


def line(axes: Axes, points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """Nothing for a single point."""
    drawn = [(axes.px(x), axes.py(y)) for x, y in points]
    return path(drawn, f"line {class_}") if len(drawn) > 1 else Markup("")


def chart(height: int, label: str, *content: Markup) -> Markup:
    """The picture; a screen reader hears `label`, then the marks."""
    return tag(
        "svg",
        *content,
        viewBox=f"0 0 {WIDTH} {height}",
        role="group",
        aria_label=label,
        class_="chart",
        xmlns="http://www.w3.org/2000/svg",
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most` of them."""
    raw = (high - low) / max(most, 1)
    if not raw > 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= raw * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def frame(
    axes: Axes,
    x_label: str,
    y_label: str = "",
    *,
    x_ticks: Sequence[float] | None = None,
    y_ticks: Sequence[float] | None = None,
    percent: bool = False,
) -> Markup:
    """Light rules behind the marks, and their numbers. An empty list of ticks leaves that side bare."""
    parts = []
    bottom = axes.height - axes.bottom
    for y in ticks(*axes.y, 4) if y_ticks is None else y_ticks:
        at = axes.py(y)
        parts.append(tag("line", x1=axes.left, x2=WIDTH - axes.right, y1=at, y2=at, class_="rule"))
        parts.append(text(axes.left - 6, at + 3.5, f"{y:.0%}" if percent else number(y), "end", "tick"))
    for x in ticks(*axes.x) if x_ticks is None else x_ticks:
        parts.append(text(axes.px(x), bottom + 15, number(x), "middle", "tick"))
    parts.append(tag("line", x1=axes.left, x2=WIDTH - axes.right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(text(WIDTH - axes.right, axes.height - 5, x_label, "end", "label"))
    if y_label:
        parts.append(text(2, 10, y_label, "start", "label"))
    return Markup("").join(parts)
