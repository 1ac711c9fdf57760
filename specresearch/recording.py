"""What a drafter answers at every place of an answer: enough to grow there, later and without it, any smaller tree.

The recorder is a tree policy that lets other policies grow their trees, asks the drafter each question once, and then
proposes nothing: the loop decodes plainly, one token a step, and comes by every place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specresearch.trees.growth import Growth
from specresearch.types import Drafter, Frontier, Step, Tree, TreePolicy, UserError

Path = tuple[int, ...]  # tokens from below the root down to a node


class Recorder(TreePolicy):
    """Stands in for `policy` and all smaller trees of its kind, for one row. `take()` after each step."""

    law, growth, size = "point", "static", 1
    on_device = False

    def __init__(self, policy: TreePolicy):
        self.family: Sequence[TreePolicy] = policy.smaller()
        self.depth, self.width = policy.depth, policy.width
        self.book: dict[str, Any] = {}

    @property
    def asked(self) -> int:
        return sum(policy.asked for policy in self.family)

    def grow(self, step: Step, ask: Any) -> Tree:
        questions = Questions(step, ask, self.depth, self.width)
        for policy in self.family:
            policy.grow(step, questions.answer)
        self.book = questions.book()
        return Tree.of_root(step)

    def take(self) -> dict[str, Any]:
        """What was asked in the last step; {} if nobody asked, since the drafter had nothing to propose."""
        book, self.book = self.book, {}
        return book


class Questions:
    """The nodes asked about in one step of one row, numbered in the order of asking; the root is number 0."""

    def __init__(self, step: Step, ask: Any, depth: int, width: int):
        assert step.root.shape[0] == 1
        self.growth = Growth(step, ask, depth)
        self.number: dict[Path, int] = {}
        self.width = width
        self.scores: list[Tensor] = []  # [V] each
        self.children: list[dict[int, float]] = []  # the best `width` tokens and their log-probabilities

    def answer(self, frontier: Frontier) -> tuple[Tensor, None]:
        paths = [tuple(token for token in path if token >= 0) for path in frontier.path[0].tolist()]
        self._ask([path for path in dict.fromkeys(paths) if path not in self.number and self._alive(path)])
        silent = torch.full_like(self.scores[0], -torch.inf)
        return torch.stack([self.scores[self.number[p]] if p in self.number else silent for p in paths])[None], None

    def _alive(self, path: Path) -> bool:
        """A frontier of fixed width holds dead nodes, too, whose parents never proposed them."""
        return not path or (path[:-1] in self.number and path[-1] in self.children[self.number[path[:-1]]])

    def _ask(self, paths: list[Path]) -> None:
        if not paths:
            return
        device = self.growth.step.root.device
        if paths == [()]:
            score, _ = self.growth.root()
        else:
            parents = torch.tensor([[self.number[path[:-1]] for path in paths]], device=device)
            score, _ = self.growth.expand(parents, torch.tensor([[path[-1] for path in paths]], device=device))
        best = score[0].topk(min(self.width, score.shape[-1]), dim=-1)
        for path, row, values, tokens in zip(paths, score[0], best.values.tolist(), best.indices.tolist()):
            self.number[path] = len(self.scores)
            self.scores.append(row)
            self.children.append({token: value for token, value in zip(tokens, values) if value > -torch.inf})

    def book(self) -> dict[str, Any]:
        """`parent`: of each node asked, its parent's number; `token`: its own; `children`, `logp`: its best tokens."""
        paths = list(self.number)
        return {
            "parent": [self.number[path[:-1]] if path else -1 for path in paths],
            "token": [path[-1] if path else -1 for path in paths],
            "children": [list(children) for children in self.children],
            "logp": [[short(value) for value in children.values()] for children in self.children],
        }


def short(value: float) -> float:
    """The shortest decimal that is the same float32: rounder numbers would make ties, and reorder a tree."""
    return float(str(np.float32(value)))


def check_recordable(drafter: Drafter, policy: TreePolicy) -> None:
    if drafter.law is not None:
        raise UserError(
            "trace.dense=true asks the drafter for its law, and this one makes its trees itself, or none: "
            "use trace.dense=false, or a drafter that can be asked"
        )
    if policy.temperature is not None:
        raise UserError(
            "trace.dense=true cannot foresee which children would be drawn: use tree.draw=topk, or temperature=0"
        )
