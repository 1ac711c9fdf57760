"""Tree policies at equal budget: each question is answered with each tree in turn, and plainly, in one process.

    python experiments/policies.py [out=FOLDER] [overrides ...]

All trees verify eight nodes, the root counted. `optimal` is shaped by RATES: how often EAGLE's first, second, ... guess was
right in an earlier run; a trace of your own gives others (`optimal:tree.acceptance=null optimal:tree.trace=TRACE`).
Overrides hold for all, `POLICY:key=value` for one.
"""

from __future__ import annotations

import sys

from side_by_side import PLAIN, Done, main, markdown

from specresearch.console import number
from specresearch.metrics import acceptance, rate, ratio

RATES = "tree.acceptance=[[.42,.12,.07,.05],[.36,.11,.06,.04],[.33,.1,.06,.04],[.31,.1,.05,.04]]"
POLICIES = {
    "chain": ["tree=chain", "tree.depth=7"],
    "static": ["tree=static", "tree.parents=[-1,0,0,0,1,1,2,4]"],
    "dynamic": ["tree=dynamic", "tree.depth=3", "tree.size=8"],
    "optimal": ["tree=optimal", "tree.depth=4", "tree.size=8", "tree.draft_cost=0.13", RATES],
    "best_first": ["tree=best_first", "tree.depth=4", "tree.size=8"],
}


def tables(done: Done) -> list[str]:
    plain = rate(done[PLAIN][1], "speculative")
    rows: dict[str, list[str]] = {"accepted length": [], "acceptance rate": [], "tokens/s, plain = 1": []}
    names = [name for name in done if name != PLAIN]
    for name in names:
        lines, blocks = done[name]
        found, own = acceptance(lines), rate(blocks, "speculative")
        rows["accepted length"].append(number(found["mean_accepted_length"]))
        rows["acceptance rate"].append(number(found["acceptance_rate"]))
        rows["tokens/s, plain = 1"].append(number(ratio(own, plain) if own and plain else None))
    return [markdown("eight nodes", names, rows)]


if __name__ == "__main__":
    main("policies", {name: ["drafter=eagle", *own] for name, own in POLICIES.items()}, tables, sys.argv[1:])
