"""Spec-Bench with every drafter: each question is answered by each drafter in turn and plainly, in one process.

    python experiments/spec_bench.py prompts.path=question.jsonl [out=FOLDER] [drafters=ngram,eagle] [overrides ...]

All drafters, 60 questions: the first ten of each group (`limit=` takes more or fewer, all groups alike). Overrides hold for
all, `DRAFTER:key=value` for one. A FOLDER that was begun is gone on with, or only read if it is complete. Speedups are all
tokens over all seconds; where Spec-Bench's own way gives another number, it is printed as well.
"""

from __future__ import annotations

import sys
from typing import Any

from side_by_side import PLAIN, Done, drafters, main, markdown

from specresearch import console
from specresearch.spec_bench import WHY, differ, measure, paired


def tables(done: Done) -> list[str]:
    """Accepted lengths and speedups by group and overall; Spec-Bench's own speedups where they differ."""
    plain = done[PLAIN][1]
    found = {name: measure(lines, paired(blocks, plain)) for name, (lines, blocks) in done.items() if name != PLAIN}
    parts = [
        table("accepted length", found, lambda own: own["mean_accepted_length"]),
        table("speedup", found, lambda own: own["speedup"]),
    ]
    if any(differ(own) for own in found.values()):
        theirs = table("speedup as Spec-Bench computes it", found, lambda own: own["as_spec_bench"]["speedup"])
        parts += [theirs, WHY.format(**next(iter(found.values()))["recounted"]) + "."]
    return parts


def table(title: str, found: dict[str, Any], value: Any) -> str:
    groups = list(next(iter(found.values()))["groups"])
    rows = {group: [console.number(value(own["groups"][group])) for own in found.values()] for group in groups}
    return markdown(
        title, list(found), rows | {"overall": [console.number(value(own["overall"])) for own in found.values()]}
    )


if __name__ == "__main__":
    main("spec_bench", drafters(sys.argv[1:]), tables, sys.argv[1:])
