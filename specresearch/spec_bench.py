"""Spec-Bench's numbers by group, as its own script computes them and as they should be; from the trace and the blocks alone.

Its script (evaluation/speed.py in hemingkx/Spec-Bench) takes the mean over questions of tokens per second, whatever their
lengths, and divides the method's mean by the baseline's. The method's tokens come from its own counter; the baseline's are
counted by tokenising its text again, less one for a BOS. `#Mean accepted tokens` is the mean over all steps, which is our
accepted length. As it should be: all tokens over all seconds, both counted as emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from specresearch.metrics import Block, Line, acceptance, rate, ratio
from specresearch.prompts.spec_bench import GROUPS

WHY = (
    "Spec-Bench's speedup: mean over questions of tokens/s, however long the answers; plain decoding's tokens counted anew "
    "from its text, less one an answer: {retokenised} for the {tokens} emitted"
)


@dataclass(frozen=True)
class Asked:
    """A question that was a block of its own, with all its turns."""

    group: str
    block: Block

    def speed(self, mode: str, tokens: str) -> float | None:
        own = self.block.get(mode, {})
        return ratio(own[tokens], own["seconds"]) if tokens in own and "seconds" in own else None


def measure(lines: Sequence[Line], blocks: Sequence[Block]) -> dict[str, Any]:
    """{groups: {group: numbers}, overall: numbers, recounted} for summary.json.

    Speeds are None where a block holds several questions (batch_size above 1) or nothing was decoded plainly.
    """
    asked = questions(lines, blocks)
    found = [group for group in GROUPS if any(line["kind"] == group for line in lines)]
    groups = {
        group: numbers([x for x in lines if x["kind"] == group], [q for q in asked if q.group == group])
        for group in found
    }
    plain = [q.block["baseline"] for q in asked if "retokenised" in q.block.get("baseline", {})]
    recounted = {key: sum(block[key] for block in plain) for key in ("tokens", "retokenised")} if plain else None
    return {"groups": groups, "overall": numbers(lines, asked), "recounted": recounted}


def questions(lines: Sequence[Line], blocks: Sequence[Block]) -> list[Asked]:
    """One for each block, in order; none at all where a block holds several."""
    asked, at = [], 0
    for block in blocks:
        own = lines[at : at + block["answers"]]
        at += block["answers"]
        if len({line["id"] for line in own}) > 1:
            return []
        asked += [Asked(own[0]["kind"], block)] if own else []
    return asked


def numbers(lines: Sequence[Line], asked: Sequence[Asked]) -> dict[str, Any]:
    """Of a group or of all. Speedups compare the same questions: those that were decoded plainly, too."""
    both = [q for q in asked if q.speed("baseline", "tokens") is not None]
    blocks = [q.block for q in both]
    spec, base = rate(blocks, "speculative"), rate(blocks, "baseline")
    method, theirs = mean(asked, "speculative", "tokens"), mean(both, "baseline", "retokenised")
    compared = mean(both, "speculative", "tokens")
    return {
        "questions": len({line["id"] for line in lines}),
        "prompts": len(lines),
        "mean_accepted_length": acceptance(lines)["mean_accepted_length"],
        "tokens_per_second": rate([q.block for q in asked], "speculative"),
        "baseline_tokens_per_second": base,
        "speedup": ratio(spec, base) if spec and base else None,
        "as_spec_bench": {
            "tokens_per_second": method,
            "baseline_tokens_per_second": theirs,
            "speedup": ratio(compared, theirs) if compared and theirs else None,
        },
    }


def mean(asked: Sequence[Asked], mode: str, tokens: str) -> float | None:
    """Unweighted over questions; None where one of them is not known."""
    speeds = [q.speed(mode, tokens) for q in asked]
    known = [speed for speed in speeds if speed is not None]
    return fmean(known) if known and len(known) == len(speeds) else None


def paired(own: Sequence[Block], plain: Sequence[Block]) -> list[Block]:
    """The blocks of a run beside those of a run of plain decoding (drafter=none) over the same questions."""
    return [{**block, "baseline": other["speculative"]} for block, other in zip(own, plain, strict=True)]


def differ(found: dict[str, Any]) -> bool:
    """Whether a speedup, as printed, is another one by Spec-Bench's way."""
    rows = [*found["groups"].values(), found["overall"]]
    return any(
        row["as_spec_bench"]["speedup"] is not None
        and f"{row['speedup']:.2f}" != f"{row['as_spec_bench']['speedup']:.2f}"
        for row in rows
    )
