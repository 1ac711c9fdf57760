"""What the drafter said at the places of one answer, as tensors that a tree policy can grow from.

A *place* i is a token of the answer that could be a root: the tokens after it are the target's own, so at temperature 0 the
accepted length there is how far they run inside the tree. Legend: B places, R nodes asked about, C tokens named, T levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specresearch.metrics import Line

Draft = dict[str, Any]  # of one place: parent, token, children, logp by node asked; `cut`: some may have more children


@dataclass(frozen=True)
class Book:
    """The places of one answer, its last token excepted: nothing follows that."""

    # Tokens go by local numbers, from 1: dead nodes of a frontier carry 0, which is nobody's child.
    logp: Tensor  # [B, R, C] of each child of each node asked, -inf where it has none
    child: Tensor  # [B, R, C] the number of that child among the nodes asked, -1 where it was not
    cut: Tensor  # [B, R] bool: more children than these may exist
    after: Tensor  # [B, T] local numbers of the tokens that came; -1 where the place never heard of it; -2 past the end
    known: Tensor  # [B] bool: the drafter was asked here
    first: Tensor  # [B] bool: as the root of a step of its own, not as a node of an earlier tree

    @property
    def places(self) -> int:
        return self.known.shape[0]


def book_of(output: Sequence[int], drafts: Sequence[Draft | None], levels: int, first: Sequence[bool]) -> Book:
    """None: the drafter was not asked at this place. {}: it was, and proposed nothing."""
    names = [sorted({t for kids in (d or {}).get("children", ()) for t in kids}) for d in drafts]
    places, most = len(drafts), max([1, *(len((d or {}).get("parent", ())) for d in drafts)])
    wide = 1 + max(map(len, names), default=0)
    logp = torch.full((places, most, wide), -torch.inf)
    child = torch.full((places, most, wide), -1)
    cut = torch.zeros(places, most, dtype=torch.bool)
    after = torch.full((places, levels), -2)
    for place, (draft, own) in enumerate(zip(drafts, names)):
        local = {token: number for number, token in enumerate(own, 1)}
        coming = [local.get(token, -1) for token in output[place + 1 : place + 1 + levels]]
        after[place, : len(coming)] = torch.tensor(coming)
        for at, values in _entries(draft or {}, local):
            logp[(place, *at)] = values
        for node, (parent, token) in enumerate(zip((draft or {}).get("parent", ()), (draft or {}).get("token", ()))):
            if parent >= 0:
                child[place, parent, local[token]] = node
        cut[place, : len((draft or {}).get("cut", ()))] = torch.tensor((draft or {}).get("cut", ()), dtype=torch.bool)
    known = torch.tensor([draft is not None for draft in drafts], dtype=torch.bool)
    return Book(logp, child, cut, after, known, torch.tensor(first, dtype=torch.bool))


def _entries(draft: Draft, local: dict[int, int]) -> Iterator[tuple[tuple[int, Tensor], Tensor]]:
    for node, (kids, values) in enumerate(zip(draft.get("children", ()), draft.get("logp", ()))):
        yield (node, torch.tensor([local[token] for token in kids], dtype=torch.long)), torch.tensor(values)


def of_dense(line: Line, width: int, levels: int) -> Book:
    """A line of dense.jsonl; the `width` best children of each node were recorded."""
    drafts = [
        {**draft, "cut": [len(kids) >= width for kids in draft["children"]]} if draft else {}
        for draft in line["drafts"]
    ]
    return book_of(line["output_ids"], drafts, levels, [True] * len(drafts))


def of_trace(line: Line, size: int, depth: int, width: int, levels: int) -> Book:
    """A line of trace.jsonl: the drafts of a step serve its root, and what is below an accepted node serves its place.

    `size`, `depth`, `width`: the tree that was recorded. Where it found fewer nodes than it would take, nothing was cut.
    """
    drafts: list[Draft | None] = [None] * (len(line["output_ids"]) - 1)
    first, at = [False] * len(drafts), 0
    for step in line["steps"]:
        for inner, node in enumerate(step["path"]):
            drafts[at + inner] = below(step, node, size, depth - inner, width)
        first[at] = True
        at += step["emitted"]
    return book_of(line["output_ids"], drafts, levels, first)


def below(step: Line, top: int, size: int, depth: int, width: int) -> Draft | None:
    """The part of a step's tree below node `top`, as the drafter's answers to the nodes that have children there.

    A leaf counts as asked, and silent, where the tree still had room for its children and they would not lie too deep.
    """
    nodes = [n for n, token in enumerate(step["tokens"]) if n == 0 or token >= 0]
    room = len(nodes) < size
    children: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes[1:]:
        children[step["parent"][node]].append(node)
    if depth < 1 or not (children[top] or room):
        return None
    draft: Draft = {"parent": [], "token": [], "children": [], "logp": [], "cut": []}
    level = [(top, -1)]
    for _ in range(depth):
        asked = [(node, parent) for node, parent in level if children[node] or (room and len(level) <= width)]
        level = [(kid, len(draft["parent"]) + i) for i, (node, _) in enumerate(asked) for kid in children[node]]
        for node, parent in asked:
            kids = children[node]
            draft["parent"].append(parent)
            draft["token"].append(step["tokens"][node])
            draft["children"].append([step["tokens"][kid] for kid in kids])
            draft["logp"].append([step["score"][kid] - step["score"][node] for kid in kids])
            draft["cut"].append(not room)
    return draft
