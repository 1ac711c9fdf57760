"""Predicted against measured speed: makes the sweep of conf/experiment/prediction.yaml, or reads one, and prints its table.

    python experiments/prediction.py [SWEEP_DIR | overrides ...]

`identity` is the accepted length as 1 + the sum of the shares of steps that kept j drafts or more, which is always true; the
two others assume that every draft is kept with the same probability, taken from the first place or from all places pooled.
"""

from __future__ import annotations

import sys

from swept import drafter, main, markdown, tree

from specresearch.console import number
from specresearch.results import Results
from specresearch.speed import theory


def show(runs: list[Results]) -> str:
    rows = []
    for run in runs:
        found = theory(run.lines)
        gap = (run.summary["predicted_speedup"] or 0) / run.summary["speedup"] - 1
        lengths = [number(found[key]) for key in ("identity", "iid_first", "iid_pooled")]
        speeds = [number(run.summary[key]) for key in ("predicted_speedup", "speedup")]
        rows.append([drafter(run), tree(run), *lengths, *speeds, f"{gap:+.0%}"])
    headings = [
        "drafter",
        "tree",
        "identity",
        "iid, first rate",
        "iid, pooled rate",
        "predicted speedup",
        "measured",
        "gap",
    ]
    return markdown(headings, rows)


if __name__ == "__main__":
    main("prediction", show, sys.argv[1:])
