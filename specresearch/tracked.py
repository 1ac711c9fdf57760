"""What a tracker shows of a finished run: numbers by flat names, curves, a row for each answer, answers coloured by origin.

Pure functions of a run's files; they know no tracker.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from specresearch.lossless.blackbox import BlackBox
from specresearch.metrics import Block, Line, acceptance, ratio

Rows = list[list[Any]]
ANSWER_COLUMNS = ["id", "turn", "kind", "tokens", "steps", "accepted_length", "tokens_per_second", "verdict", "finish"]
EXAMPLES = 8
COLOURS = {"prompt": "#d9d9d9", "drafted": "#b5e3b5", "bonus": "#ffe08a"}  # behind dark text, in light and dark pages
LEGEND = {
    "prompt": "first token, from the prompt's pass",
    "drafted": "drafted and accepted",
    "bonus": "the target's own",
}

_SPEED = (
    "tokens_per_second baseline_tokens_per_second speedup predicted_speedup hf_tokens_per_second hf_speedup time "
    "peak_memory_bytes"
)
SUMMARY_NAMES = {
    "mean_accepted_length": "accept/mean_length",
    "acceptance_rate": "accept/rate",
    "acceptance_rate_by_depth": "accept/rate_depth",
    "conditional_acceptance_rate_by_depth": "accept/conditional_rate_depth",
    **{key: f"accept/{key}" for key in ("prompts", "tokens", "steps", "target_passes", "by_kind")},
    **{key: f"speed/{key}" for key in _SPEED.split()},
    "lossless": "lossless",
    "spec_bench": "spec_bench",
}


def flatten_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Map summary.json to flat `accept/`, `speed/` and `lossless/` keys; None and other keys are dropped."""
    return {path: leaf for key, name in SUMMARY_NAMES.items() for path, leaf in _leaves(name, summary.get(key))}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf): dicts extend the path by `/key`, lists by `_1`, `_2`, ..."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}/{key}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value, start=1):
            yield from _leaves(f"{name}_{number}", item)
    elif value is not None:
        yield name, value


def depth_rows(summary: dict[str, Any]) -> Rows:
    """[depth, share of all steps with that many accepted drafts]"""
    return [[depth, rate] for depth, rate in enumerate(summary.get("acceptance_rate_by_depth") or (), 1)]


def time_rows(summary: dict[str, Any]) -> Rows:
    """[part, seconds] of the speculative decoding."""
    return [[part, seconds] for part, seconds in (summary.get("time") or {}).items()]


def evidence_rows(blocks: Sequence[Block]) -> Rows:
    """[tokens judged so far, log10 E] after each block; nothing at temperature 0, where answers are compared instead."""
    pooled = BlackBox()
    for block in blocks:
        if "evidence" in block:
            pooled.merge(BlackBox().load(block["evidence"]))
    return [list(point) for point in pooled.curve]


def answer_rows(lines: Sequence[Line], blocks: Sequence[Block]) -> Rows:
    """A row of `ANSWER_COLUMNS` for each answer. Speed: where a block was one question, that of the question."""
    rows = []
    for block, answers in by_block(lines, blocks):
        alone = len({line["id"] for line in answers}) == 1
        own = block["speculative"]
        speed = ratio(own["tokens"], own["seconds"]) if alone else None
        verdicts = {(found["id"], found["turn"]): verdict(found) for found in block.get("check", ())}
        for line in answers:
            length = acceptance([line])["mean_accepted_length"]
            counts = [len(line["output_ids"]), len(line["steps"]), length]
            judged = verdicts.get((line["id"], line["turn"]))
            rows.append([str(line["id"]), line["turn"], line["kind"], *counts, speed, judged, line["finish"]])
    return rows


def by_block(lines: Sequence[Line], blocks: Sequence[Block]) -> Iterator[tuple[Block, Sequence[Line]]]:
    at = 0
    for block in blocks:
        yield block, lines[at : at + block["answers"]]
        at += block["answers"]


def verdict(found: dict[str, Any]) -> str:
    """Of one answer, compared with plain decoding: lossless, near_tie or violation."""
    return "violation" if found["violations"] else "near_tie" if found["near_ties"] else "lossless"


def examples(lines: Sequence[Line]) -> list[Line]:
    """The first answer of each kind, then others, `EXAMPLES` at most."""
    firsts = list({line["kind"]: line for line in reversed(lines)}.values())[::-1]
    return [*firsts, *(line for line in lines if not any(line is first for first in firsts))][:EXAMPLES]


def provenance_html(line: Line, pieces: dict[int, str]) -> str:
    """An answer as HTML: each token on the colour of its origin, its step in the tooltip. Texts are escaped."""
    spans = [span(origin, pieces.get(token, f"<{token}>"), step) for token, origin, step in origins(line)]
    legend = " ".join(f'<b style="{style(origin)}">{text}</b>' for origin, text in LEGEND.items())
    body = f'<pre style="white-space: pre-wrap; font: 14px/1.6 system-ui">{"".join(spans)}</pre>'
    return f'<meta charset="utf-8"><p style="font: 12px system-ui">{legend}</p>{body}'


def origins(line: Line) -> Iterator[tuple[int, str, int]]:
    """(token, origin, step) of each output token; step 0 is the prompt's pass."""
    yield line["output_ids"][0], "prompt", 0
    at = 1
    for number, step in enumerate(line["steps"], 1):
        for place, token in enumerate(line["output_ids"][at : at + step["emitted"]], 1):
            yield token, "bonus" if place == step["emitted"] else "drafted", number
        at += step["emitted"]


def span(origin: str, text: str, step: int) -> str:
    return f'<span style="{style(origin)}" title="step {step}: {LEGEND[origin]}">{html.escape(text)}</span>'


def style(origin: str) -> str:
    return f"background: {COLOURS[origin]}; color: #111"
