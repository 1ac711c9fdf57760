"""Acceptance by rule and temperature: each question is answered under each rule in turn, in one process.

    python experiments/rules.py [out=FOLDER] [overrides ...]

On chains all rules judge drafts that were sampled by the same law; on trees each rule has the tree that it is lossless on.
Overrides hold for all, `VARIANT:key=value` for one, e.g. `rejection@1:seed=3`.
"""

from __future__ import annotations

import sys

from side_by_side import Done, main, markdown

from specresearch.console import number
from specresearch.metrics import acceptance

TEMPERATURES = (0.5, 1.0)
CHAIN = ["tree=chain", "tree.depth=3"]
WIDE = ["tree=static", "tree.widths=[3,1]"]
RULES = {
    "chain": dict.fromkeys(("rejection", "target_only", "sample_and_match", "block", "traversal"), CHAIN),
    "tree": {
        "rejection": [*WIDE, "tree.draw=without_replacement"],
        "traversal": [*WIDE, "tree.draw=without_replacement"],
        "spectr": [*WIDE, "tree.draw=iid"],
        "target_only": [*WIDE, "tree.draw=topk"],
        "sample_and_match": [*WIDE, "tree.draw=topk"],
    },
}


def variants() -> dict[str, list[str]]:
    return {
        f"{shape}-{rule}@{heat:g}": ["drafter=eagle", f"verifier={rule}", f"temperature={heat:g}", *tree]
        for heat in TEMPERATURES
        for shape, rules in RULES.items()
        for rule, tree in rules.items()
    }


def tables(done: Done) -> list[str]:
    def length(name: str) -> str:
        return number(acceptance(done[name][0])["mean_accepted_length"])

    return [
        markdown(
            f"accepted length, {shape}",
            [f"temperature {heat:g}" for heat in TEMPERATURES],
            {rule: [length(f"{shape}-{rule}@{heat:g}") for heat in TEMPERATURES] for rule in rules},
        )
        for shape, rules in RULES.items()
    ]


if __name__ == "__main__":
    main("rules", variants(), tables, sys.argv[1:])
