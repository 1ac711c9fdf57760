"""What a grammar costs and what it does to drafting: masks by the size of the tree, and runs that take turns.

    python experiments/grammar.py masks [target=... overrides]
    python experiments/grammar.py [out=FOLDER] [overrides ...]

Masks are timed alone, in CPU seconds of the thread, so that other work on the machine counts little: at every place of an
answer the tree's nodes are drawn from what the grammar allows there, so that all are walked through. Drafts off the grammar
cost less. "library" is xgrammar's own traversal of the same trees, which leaves no law behind EOS.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from side_by_side import Done, main, markdown

import specresearch
from specresearch.console import number
from specresearch.grammar.backend import Compiled
from specresearch.grammar.rows import Rows
from specresearch.grammar.source import Source, json_schema, regex
from specresearch.kernels.mask import unpack
from specresearch.kernels.tree import links
from specresearch.metrics import acceptance
from specresearch.types import Target, Tree

SIZES = (1, 8, 16, 32, 64, 128)
LEVELS = 5
PLACES = 12  # of an answer, at which a tree of each size is walked through
ANSWER = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 120},
        "topic": {"enum": ["people", "language", "science", "mathematics", "code", "other"]},
        "sure": {"type": "boolean"},
    },
    "required": ["answer", "topic", "sure"],
}
TABLE = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
GRAMMARS: dict[str, tuple[Callable[[], Source], str]] = {  # and an answer that follows each
    "record": (
        lambda: json_schema(schema=ANSWER, whitespace=None, draft=False),
        '{"answer": "The sky is blue because of scattering.", "topic": "science", "sure": true}',
    ),
    "numbers": (
        lambda: json_schema(schema=TABLE, whitespace=None, draft=False),
        "[[1, 2.5, 3e4], [0.25, 16, -3], [7, 8, 9.75]]",
    ),
    "date": (
        lambda: regex(pattern=r"On [A-Z][a-z]+ [0-9]{1,2}, [0-9]{4}( at [0-9]{2}:[0-9]{2})?\.", draft=False),
        "On January 12, 1987 at 16:30.",
    ),
}


def masks(target: Target) -> list[str]:
    rows = {}
    for name, (source, answer) in GRAMMARS.items():
        began = time.perf_counter()
        grammar = source().compile(target)
        compiled = time.perf_counter() - began
        cells = [f"{compiled * 1e3:.0f}"]
        for size in SIZES:
            ours, theirs = zip(*timings(grammar, target.encode(answer), size))
            cells.append(f"{statistics.median(ours) * 1e6:.0f} / {statistics.median(theirs) * 1e6:.0f}")
        rows[name] = cells
    columns = ["compile, ms", *(f"N = {size}" for size in SIZES)]
    return [markdown("us a tree, ours / library", columns, rows)]


def timings(grammar: Compiled, answer: list[int], size: int) -> Iterator[tuple[float, float]]:
    """CPU seconds of one tree at each of some places of an answer: by `Rows`, and by the library's own traversal."""
    rows, chance = Rows(grammar, 1, torch.device("cpu")), random.Random(size)
    rows.start([0])
    stride = max(len(answer) // PLACES, 1)
    for place, token in enumerate(answer):
        if place % stride == 0:
            tree = grown(grammar, rows, answer[:place], size, chance)
            packed = torch.stack([tree.tokens, *links(tree.parent, tree.valid)])
            yield seconds(rows.look(tree)), library(grammar, rows, packed)
        rows.advance(0, [token])


def library(grammar: Compiled, rows: Rows, packed: torch.Tensor) -> float:
    tokens, first, sibling = packed[:, 0].contiguous()
    allow = torch.full((len(tokens), -(-grammar.vocab_size // 32)), -1, dtype=torch.int32)
    inner: Any = rows.matchers[0]
    return seconds(lambda: inner.inner.traverse_draft_tree(first, sibling, tokens, allow))


def seconds(call: Callable[[], object]) -> float:
    call()
    began = time.thread_time()
    call()
    return time.thread_time() - began


def grown(grammar: Compiled, rows: Rows, known: list[int], size: int, chance: random.Random) -> Tree:
    """A tree of `size` nodes, LEVELS deep at most, of tokens that the grammar allows, EOS apart."""
    tokens, parent, depth = [0], [-1], [0]
    paths: list[list[int]] = [[]]
    while len(tokens) < size:
        above = chance.choice([node for node in range(len(tokens)) if depth[node] < LEVELS])
        allowed = following(grammar, known + paths[above])
        token = chance.choice(allowed) if allowed else 0
        tokens.append(token)
        parent.append(above)
        depth.append(depth[above] + 1)
        paths.append([*paths[above], token])
    one = torch.tensor([tokens])
    return Tree(one, torch.tensor([parent]), torch.tensor([depth]), one >= 0, one.float(), "point", "static", LEVELS)


def following(grammar: Compiled, ids: list[int]) -> list[int]:
    matcher = grammar.matcher()
    if not all(matcher.accept(token) for token in ids) or matcher.terminated:
        return []
    allow = torch.full((1, -(-grammar.vocab_size // 32)), -1, dtype=torch.int32)
    matcher.fill(allow, 0)
    found = unpack(allow, grammar.vocab_size)[0].nonzero()[:, 0].tolist()
    return [token for token in found if token not in grammar.eos]


def variants() -> dict[str, list[str]]:
    schema = ["grammar=json_schema", f"grammar.schema={json.dumps(ANSWER)}", "grammar.whitespace=1"]
    return {"free": [], "masked": schema, "drafts_too": [*schema, "grammar.draft=true"]}


def tables(done: Done) -> list[str]:
    rows = {}
    for name, (lines, blocks) in done.items():
        own = [block["speculative"] for block in blocks]
        wall, spent = sum(b["seconds"] for b in own), sum(b.get("mask_seconds", 0.0) for b in own)
        tokens = sum(len(line["output_ids"]) for line in lines)
        found = acceptance(lines)
        ended = sum(line["finish"] == "eos" for line in lines)
        cells = [number(found["mean_accepted_length"]), number(found["acceptance_rate"]), f"{spent / wall:.1%}"]
        rows[name] = [*cells, f"{spent / max(found['steps'], 1) * 1e6:.0f}", f"{ended} of {len(lines)}", str(tokens)]
    return [
        markdown(
            "", ["accepted length", "acceptance rate", "masks, share of time", "us a step", "ended", "tokens"], rows
        )
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["masks"]:
        print("\n\n".join(masks(specresearch.engine("drafter=none", *sys.argv[2:]).parts.target)))
    else:
        main("grammar", variants(), tables, sys.argv[1:])
