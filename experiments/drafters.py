"""Drafters side by side: one process, one target, every block of prompts answered by each drafter in turn and plainly.

    python experiments/drafters.py [out=FOLDER] [drafters=ngram,medusa,small_lm,eagle] [overrides ...]

Overrides (`temperature=1 tree.size=4 limit=28 ...`) hold for all; `DRAFTER:key=value` for one. A FOLDER that was begun is
gone on with, or only read if it is complete. The order changes from block to block, so what slows the machine down slows
all; `experiments/drafters.md` holds recorded results.
"""

from __future__ import annotations

import sys
from typing import Any

from side_by_side import PLAIN, Done, drafters, main, markdown

from specresearch import console
from specresearch.metrics import Block, acceptance, rate, ratio


def accepted(done: Done, name: str, kind: str | None) -> str:
    length = acceptance([line for line in done[name][0] if kind in (None, line["kind"])])["mean_accepted_length"]
    return console.number(length)


def gain(done: Done, name: str, kind: str | None) -> str:
    """Tokens per second against plain decoding; by kind only where blocks hold one kind."""
    own, plain = (
        rate((b for b in done[n][1] if kind is None or b["kinds"] == [kind]), "speculative") for n in (name, PLAIN)
    )
    return console.number(ratio(own, plain) if own and plain else None)


def table(title: str, done: Done, cell: Any) -> str:
    names = [name for name in done if name != PLAIN]
    kinds = dict.fromkeys(line["kind"] for line in done[PLAIN][0])
    rows = {
        label: [cell(done, name, kind) for name in names]
        for label, kind in [*((k, k) for k in kinds), ("pooled", None)]
    }
    return markdown(title, names, rows)


def costs(done: Done) -> str:
    """What a step costs, in steps of plain decoding: drafting (c), the pass over the tree, the rest."""
    plain = step_times(done[PLAIN][1])
    unit = sum(plain.values())
    rows = ["| drafter | draft cost c | tree pass | rest | draft's share of a step |", "|---|---:|---:|---:|---:|"]
    for name in done:
        own = step_times(done[name][1])
        draft, target = own.pop("draft"), own.pop("target")
        rest = sum(own.values())
        share = draft / (draft + target + rest)
        rows.append(f"| {name} | {draft / unit:.2f} | {target / unit:.2f} | {rest / unit:.2f} | {share:.0%} |")
    return "\n".join(rows)


def step_times(blocks: list[Block]) -> dict[str, float]:
    """Seconds of a target pass and what belongs to it, by part; prefill left out."""
    passes = sum(b["speculative"]["target_passes"] for b in blocks)
    parts = ("draft", "target", "verify", "commit")
    times = {part: sum(b["speculative"]["time"].get(part, 0.0) for b in blocks) / passes for part in parts}
    whole = sum(b["speculative"]["seconds"] - b["speculative"]["time"].get("prefill", 0.0) for b in blocks) / passes
    return times | {"other": max(whole - sum(times.values()), 0.0)}


def tables(done: Done) -> list[str]:
    """Accepted lengths and speeds by kind of prompt, and what a step costs; from the lines and the blocks alone."""
    return [table("accepted length", done, accepted), table("tokens/s, plain = 1", done, gain), costs(done)]


if __name__ == "__main__":
    main("drafters", drafters(sys.argv[1:]), tables, sys.argv[1:])
