"""What the questions and the blocks of a run contribute to its numbers, and how those of two runs are laid side by side."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from specresearch.comparison.bootstrap import Array, Quotient
from specresearch.metrics import Block, Line, timed
from specresearch.results import Results

Id = int | str


@dataclass(frozen=True)
class Timed:
    """Questions that were decoded together, in both modes. More than one question: their times cannot be told apart."""

    questions: frozenset[Id]
    sums: Array  # [4]: tokens and seconds with speculation, tokens and seconds of plain decoding

    def __add__(self, other: Timed) -> Timed:
        return Timed(self.questions | other.questions, self.sums + other.sums)


NOTHING = Timed(frozenset(), np.zeros(4))


def accepted(run: Results, questions: Sequence[Id]) -> Quotient:
    """Tokens emitted in steps / steps, question by question."""
    steps = [[step for line in lines for step in line["steps"]] for lines in _of(run, questions)]
    emitted = [sum(step["emitted"] for step in each) for each in steps]
    return Quotient(np.array([emitted], float), np.array([[len(each) for each in steps]], float))


def _of(run: Results, questions: Sequence[Id]) -> list[list[Line]]:
    answers = run.by_question()
    return [answers[id] for id in questions]


def blocks_within(run: Results, questions: Collection[Id]) -> list[tuple[Block, list[Line]]]:
    """The blocks that hold none but these questions, with their answers."""
    return [(block, lines) for block, lines in run.by_block() if all(line["id"] in questions for line in lines)]


def timings(run: Results, questions: Collection[Id]) -> list[Timed]:
    """The blocks that were timed in both modes and hold none but these questions."""
    found = []
    for block, lines in blocks_within(run, questions):
        ids = frozenset(line["id"] for line in lines)
        if ids and timed(block):
            sums = [block[mode][key] for mode in ("speculative", "baseline") for key in ("tokens", "seconds")]
            found.append(Timed(ids, np.array(sums, float)))
    return found


def speedup(blocks: Sequence[Timed]) -> Quotient:
    """Tokens per second with speculation / of plain decoding, block by block."""
    tokens, seconds, plain_tokens, plain_seconds = np.array([block.sums for block in blocks]).reshape(-1, 4).T
    return Quotient(np.array([tokens, plain_seconds]), np.array([seconds, plain_tokens]))


def aligned(first: Sequence[Timed], second: Sequence[Timed]) -> tuple[list[Timed], list[Timed]]:
    """The units that two runs share: blocks with the same questions. Where batch sizes differ, smaller blocks add up."""
    first, second = _shared(first, second)
    groups: list[frozenset[Id]] = []
    for block in (*first, *second):
        touched = [group for group in groups if group & block.questions]
        groups = [group for group in groups if not group & block.questions] + [block.questions.union(*touched)]
    return [_total(first, group) for group in groups], [_total(second, group) for group in groups]


def _shared(first: Sequence[Timed], second: Sequence[Timed]) -> tuple[list[Timed], list[Timed]]:
    """Drop the blocks that hold a question which the other run has not, until both hold the same."""
    sides = (list(first), list(second))
    while True:
        ids = [frozenset[Id]().union(*(block.questions for block in side)) for side in sides]
        if ids[0] == ids[1]:
            return sides
        both = ids[0] & ids[1]
        sides = ([b for b in sides[0] if b.questions <= both], [b for b in sides[1] if b.questions <= both])


def _total(blocks: Sequence[Timed], questions: frozenset[Id]) -> Timed:
    return sum((block for block in blocks if block.questions <= questions), NOTHING)
