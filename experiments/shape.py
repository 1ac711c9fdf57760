"""Accepted length and speed of EAGLE's dynamic tree by depth and topk: makes the sweep of conf/experiment/shape.yaml, or reads
one, prints its tables and draws shape.svg beside this file.

    python experiments/shape.py [SWEEP_DIR | overrides ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from swept import draw, main, markdown

from specresearch.console import number
from specresearch.results import Results


def show(runs: list[Results]) -> str:
    cells = {(r.summary["config"]["tree"]["depth"], r.summary["config"]["tree"]["topk"]): r.summary for r in runs}
    depths, topks = (sorted({key[i] for key in cells}) for i in (0, 1))
    tables = []
    for title, key in (("accepted length", "mean_accepted_length"), ("tokens/s, plain = 1", "speedup")):
        rows = [[f"depth {d}", *(number(cells.get((d, k), {}).get(key)) for k in topks)] for d in depths]
        tables.append(markdown([title, *(f"topk {k}" for k in topks)], rows))
    lines = {f"topk {k}": [(d, cells[d, k]["mean_accepted_length"]) for d in depths if (d, k) in cells] for k in topks}
    draw(Path(__file__).with_suffix(".svg"), lines, "depth", "accepted length")
    return "\n\n".join(tables)


if __name__ == "__main__":
    main("shape", show, sys.argv[1:])
