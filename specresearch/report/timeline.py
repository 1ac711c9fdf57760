"""One generation, token by token, as compact data for the page's script. What does not fit is left out, and counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from specresearch.metrics import Line, ratio
from specresearch.results import Results

BUDGET = 3_500_000  # bytes of the answers that a report holds
PROMPT = 1500  # characters of a prompt's end

Data = dict[str, Any]


def timeline(results: Results, budget: int = BUDGET) -> Data:
    """{pieces, answers, of}: the answers in question first, then those of each kind in turn, until `budget` is spent."""
    answers, named, left = [], set[int](), budget
    for line in _order(results):
        answer = _answer(line, results.pieces, left)
        if answer is None:
            break
        answers.append(answer)
        named |= _tokens(answer)
        left -= _size(answer)
    places = {(line["id"], line["turn"]): i for i, line in enumerate(results.lines)}
    answers.sort(key=lambda answer: places[answer["id"], answer["turn"]])
    pieces = {token: results.pieces[token] for token in sorted(named) if results.pieces.get(token)}
    return {"pieces": pieces, "answers": answers, "of": len(results.lines)}


def _order(results: Results) -> list[Line]:
    found = results.summary["lossless"]
    entries = [*found.get("violations", ()), *found.get("near_ties", ())]
    doubted = {(entry["id"], entry["turn"]) for entry in entries} | {(id, 0) for id in found.get("suspects", ())}
    first = [line for line in results.lines if (line["id"], line["turn"]) in doubted]
    rest = [line for line in results.lines if (line["id"], line["turn"]) not in doubted]
    kinds = dict.fromkeys(line["kind"] for line in rest)
    turns = zip_longest(*([line for line in rest if line["kind"] == kind] for kind in kinds))
    return first + [line for turn in turns for line in turn if line is not None]


def _answer(line: Line, pieces: dict[int, str], room: int) -> Data | None:
    """As many steps as there is room for; None where not even a few are."""
    steps: list[list[Any]] = []
    head = {
        **{"id": line["id"], "kind": line["kind"], "turn": line["turn"], "finish": line["finish"]},
        **{"prompt": prompt(line["prompt_ids"], pieces), "first": line["output_ids"][:1], "count": len(line["steps"])},
        "length": ratio(len(line["output_ids"]) - 1, len(line["steps"])),
    }
    room -= _size(head)
    for step in line["steps"]:
        compact = _step(step)
        room -= _size(compact) + 1
        if room < 0:
            break
        steps.append(compact)
    whole = len(steps) == len(line["steps"])
    return head | {"steps": steps} if (room >= 0 and whole) or len(steps) >= 20 else None


def _step(step: Line) -> list[Any]:
    """[accepted nodes, tokens, parents, scores, next token, ms]; the root, node 0, and pads are left out."""
    real = [node for node, token in enumerate(step["tokens"]) if node == 0 or token >= 0]
    place = {node: i for i, node in enumerate(real)}
    nodes = real[1:]
    score = [None if step["score"][node] is None else round(step["score"][node], 2) for node in nodes]
    tokens, parents = [step["tokens"][node] for node in nodes], [place[step["parent"][node]] for node in nodes]
    return [[place[n] for n in step["path"][1:]], tokens, parents, score, step["next_token"], round(step["ms"], 1)]


def prompt(ids: Sequence[int], pieces: dict[int, str]) -> str:
    text = "".join(pieces.get(token) or f"⟨{token}⟩" for token in ids[-PROMPT:])
    return text if len(text) <= PROMPT else "…" + text[-PROMPT:]


def _tokens(answer: Data) -> set[int]:
    found = set(answer["first"])
    for _, tokens, _, _, next_token, _ in answer["steps"]:
        found |= {*tokens, next_token}
    return found


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))
