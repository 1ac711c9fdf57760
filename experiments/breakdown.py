"""Where the time of a target pass goes, by drafter: makes the sweep of conf/experiment/breakdown.yaml, or reads one.

    python experiments/breakdown.py [SWEEP_DIR | overrides ...]

The prompts' time (prefill) is spread over the passes.
"""

from __future__ import annotations

import sys

from swept import drafter, main, markdown, tree

from specresearch.results import Results

PARTS = ("prefill", "draft", "target", "verify", "commit", "other")


def show(runs: list[Results]) -> str:
    rows = []
    for run in runs:
        passes, time = run.summary["target_passes"], run.summary["time"]
        cells = [f"{1e3 * time[part] / passes:.1f}" for part in PARTS]
        speeds = [f"{run.summary[key]:.2f}" for key in ("mean_accepted_length", "speedup")]
        rows.append([drafter(run), tree(run), *cells, f"{1e3 * sum(time.values()) / passes:.1f}", *speeds])
    return markdown(["ms a pass", "tree", *PARTS, "sum", "accepted length", "tokens/s, plain = 1"], rows)


if __name__ == "__main__":
    main("breakdown", show, sys.argv[1:])
