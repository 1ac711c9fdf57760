"""The points of experiments/growth.py, and its tables, from its files alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peer.machine import line
from swept import markdown

XS = {
    "tree": (1, 2, 4, 8, 16, 32, 64, 128),
    "context": (256, 512, 1024, 2048, 4096, 8192),
    "batch": (1, 2, 4, 8, 16),
}
CONTEXT = 256
DEEPEST, WIDEST = 6, 8  # of the trees that grow


@dataclass(frozen=True)
class Point:
    curve: str
    x: int
    mode: str  # plain | eagle

    @property
    def context(self) -> int:
        return self.x if self.curve == "context" else CONTEXT

    @property
    def batch(self) -> int:
        return self.x if self.curve == "batch" else 1

    def overrides(self) -> list[str]:
        if self.mode == "plain":
            return ["drafter=none"]
        if self.curve != "tree":
            return ["drafter=eagle"]
        deep, wide = min(DEEPEST, self.x - 1), min(WIDEST, self.x - 1)
        return ["drafter=eagle", f"tree.depth={deep}", f"tree.topk={wide}", f"tree.size={self.x}"]


@dataclass(frozen=True)
class Curves:
    lines: list[dict[str, Any]]
    peaks: list[dict[str, Any]]
    about: dict[str, Any]

    def time(self, point: Point, *parts: str) -> float | None:
        """Milliseconds of the parts together, or of the whole step."""
        key = {"curve": point.curve, "x": point.x, "mode": point.mode}
        own = [x["time"] for x in self.lines if key.items() <= x.items()]
        return 1e3 * statistics.median(sum(t[p] for p in parts or t) for t in own) if own else None

    @property
    def bandwidth(self) -> float:
        return statistics.median(x["rate"] for x in self.lines if x["curve"] == "bandwidth")

    def floor(self, point: Point) -> float:
        """Milliseconds to read the weights and every row's K and V."""
        read = self.about["weights"] + self.about["cache"] * point.context * point.batch
        return 1e3 * read / self.bandwidth


def law(xs: Sequence[float], ys: Sequence[float], unit: str, x: str) -> str:
    if len(xs) < 3:
        return ""
    a, b = line(list(xs), list(ys))
    off = max(abs(a + b * u - y) for u, y in zip(xs, ys))
    return f"{a:.4g} + {b:.3g} {x} {unit}, off by at most {off:.2g}"


def time_table(c: Curves, curve: str) -> str:
    heads = [curve, "plain pass, ms", "eagle: pass", "draft", "rest", "step", "floor of a pass", "pass / floor"]
    rows = []
    for x in XS[curve]:
        plain, eagle = Point(curve, x, "plain"), Point(curve, x, "eagle")
        parts = (("target",), ("draft",), ("verify", "commit", "other"), ())
        times = [c.time(plain, "target"), *(c.time(eagle, *p) for p in parts)]
        shown = next((t for t in times[:2] if t is not None), None)
        if shown is not None:
            floor = c.floor(plain)
            rows.append([str(x), *map(number, times), f"{floor:.1f}", f"{shown / floor:.2f}"])
    laws = []
    for name, mode, parts in (("plain pass", "plain", ("target",)), ("eagle's step", "eagle", ())):
        found = [(x, t) for x in XS[curve] if (t := c.time(Point(curve, x, mode), *parts)) is not None]
        if text := law([x for x, _ in found], [t for _, t in found], "ms", curve):
            laws.append(f"{name}: {text}")
    return "\n\n".join([markdown(heads, rows), "; ".join(laws)])


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def memory_table(c: Curves, curve: str) -> str:
    found = {x["x"]: x["bytes"] / 2**20 for x in c.peaks if x["curve"] == curve}
    rows = []
    for x, peak in found.items():
        point = Point(curve, x, "eagle")
        held = (c.about["weights"] + c.about["cache"] * point.context * point.batch) / 2**20
        rows.append([str(x), f"{peak:.0f}", f"{held:.0f}"])
    each = c.about["cache"] / 2**20 * (CONTEXT if curve == "batch" else 1)
    text = law(list(found), list(found.values()), "MiB", curve)
    heads = [f"memory by {curve}", "peak, MiB", "floor: weights and cache"]
    return f"{markdown(heads, rows)}\n\n{text}; the cache alone {each:.3g} MiB each"


def tables(c: Curves) -> str:
    curves = [curve for curve in XS if any(x["curve"] == curve for x in c.lines)]
    parts = [time_table(c, curve) for curve in curves]
    parts += [memory_table(c, curve) for curve in ("context", "batch") if any(x["curve"] == curve for x in c.peaks)]
    facts = [f"- memory is read at {c.bandwidth / 1e9:.1f} GB/s; weights {c.about['weights'] / 1e6:.0f} MB, "]
    facts[0] += f"cache {c.about['cache'] / 1e3:.1f} KB a token; overrides: {' '.join(c.about['overrides']) or 'none'}"
    return "\n\n".join([*parts, "\n".join([*facts, f"- {c.about['where']}"])])
