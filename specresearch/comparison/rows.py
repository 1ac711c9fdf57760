"""The numbers of a comparison: each run's own, and its ratios to the reference run on the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specresearch.comparison.bootstrap import UNKNOWN, Bootstrap, Estimate, holm
from specresearch.comparison.conditions import varying
from specresearch.comparison.units import Id, accepted, aligned, blocks_within, speedup, timings
from specresearch.metrics import rate
from specresearch.results import Results
from specresearch.speed import predicted_speedup


@dataclass(frozen=True)
class Row:
    run: Results
    labels: list[str]  # values of the keys that vary
    answers: int
    length: Estimate  # tokens per step
    tokens_per_second: float | None
    speedup: Estimate
    predicted: float | None  # speedup from measured costs
    verdict: str
    tv_bound: float | None  # of a lossy rule
    length_ratio: Estimate = UNKNOWN  # to the reference; p is corrected for the number of comparisons
    speed_ratio: Estimate = UNKNOWN  # of speedups; of tokens per second, without an interval, if `raw`
    raw: bool = False  # one of the two runs has no baseline


@dataclass(frozen=True)
class Comparison:
    keys: list[str]  # headings of the labels
    rows: list[Row]
    reference: int  # its index
    questions: int
    boot: Bootstrap

    @property
    def tests(self) -> int:
        return sum(estimate.p is not None for row in self.rows for estimate in (row.length_ratio, row.speed_ratio))

    def significant(self, estimate: Estimate) -> bool:
        return estimate.p is not None and estimate.p < 1 - self.boot.confidence


def compare(runs: Sequence[Results], questions: Sequence[Id], reference: int, boot: Bootstrap) -> Comparison:
    keys, labels = _labels(runs)
    rows = [_alone(run, labels[i], questions, boot) for i, run in enumerate(runs)]
    base = runs[reference]
    rows = [row if row.run is base else _against(row, base, rows[reference], questions, boot) for row in rows]
    return Comparison(keys, _corrected(rows), reference, len(questions), boot)


def _labels(runs: Sequence[Results]) -> tuple[list[str], list[list[str]]]:
    """What varies; the folders' names as well, where that does not tell the runs apart."""
    columns = varying(runs)
    if len({*zip(*columns.values())}) < len(runs):
        columns["folder"] = [run.folder.resolve().name for run in runs]
    return list(columns), [list(values) for values in zip(*columns.values())]


def _alone(run: Results, labels: list[str], questions: Sequence[Id], boot: Bootstrap) -> Row:
    blocks, lossless = blocks_within(run, questions), run.summary["lossless"]
    lines = [line for id in questions for line in run.by_question()[id]]
    costs = run.summary.get("costs")
    return Row(
        run,
        labels,
        answers=len(lines),
        length=at_least_one(boot.estimate(accepted(run, questions))),
        tokens_per_second=rate((block for block, _ in blocks), "speculative"),
        speedup=boot.estimate(speedup(timings(run, questions))),
        predicted=predicted_speedup(blocks, costs) if costs else None,
        verdict=lossless["verdict"],
        tv_bound=lossless.get("tv_bound"),
    )


def at_least_one(length: Estimate) -> Estimate:
    """A step emits a token at least, which the bootstrap does not know."""
    return length if length.low is None else replace(length, low=max(1.0, length.low))


def _against(row: Row, base: Results, base_row: Row, questions: Sequence[Id], boot: Bootstrap) -> Row:
    length = boot.estimate(accepted(row.run, questions) / accepted(base, questions))
    ours, theirs = timings(row.run, questions), timings(base, questions)
    if ours and theirs:
        one, other = aligned(ours, theirs)
        return replace(row, length_ratio=length, speed_ratio=boot.estimate(speedup(one) / speedup(other)))
    one_rate, other_rate = row.tokens_per_second, base_row.tokens_per_second
    raw = Estimate(one_rate / other_rate if one_rate and other_rate else None)
    return replace(row, length_ratio=length, speed_ratio=raw, raw=True)


def _corrected(rows: Sequence[Row]) -> list[Row]:
    values = holm([estimate.p for row in rows for estimate in (row.length_ratio, row.speed_ratio)])
    return [
        replace(row, length_ratio=replace(row.length_ratio, p=p), speed_ratio=replace(row.speed_ratio, p=q))
        for row, p, q in zip(rows, values[::2], values[1::2])
    ]
