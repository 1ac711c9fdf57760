"""Spec-Bench's questions, by its six groups: `prompts=spec_bench prompts.path=question.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from specresearch.prompts import Question, file
from specresearch.types import UserError

GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SOURCE = "data/spec_bench/question.jsonl in the repositories hemingkx/Spec-Bench and SafeAILab/EAGLE on GitHub"
T = TypeVar("T")


def spec_bench(*, path: str | None) -> list[Question]:
    """The questions of the file, their groups in turn, so that the first 6n hold n of each; likewise MT-bench's categories.

    Every second round runs backwards: with six groups, a group would otherwise always be decoded in the same order of modes.
    Raises UserError where the file is missing or is not Spec-Bench's.
    """
    if path is None or not Path(path).is_file():
        missing = "prompts.path must be given" if path is None else f"prompts.path={path} is missing"
        raise UserError(f"{missing}: fetch Spec-Bench's questions ({SOURCE}), then prompts.path=question.jsonl")
    by_category: dict[str, list[Question]] = {}
    for question in file(path=path):
        if _group(question.kind) is None:
            known = ", ".join((*GROUPS[1:], *MT_BENCH))
            raise UserError(f"{path}: {question.id} has the category {question.kind!r}; Spec-Bench's are {known}")
        by_category.setdefault(question.kind, []).append(question)
    first = in_turn(by_category.get(category, []) for category in MT_BENCH)
    rounds = zip_longest(first, *(by_category.get(group, []) for group in GROUPS[1:]))
    ordered = [q for number, each in enumerate(rounds) for q in (each[::-1] if number % 2 else each) if q is not None]
    return [Question(q.id, _group(q.kind) or q.kind, q.turns) for q in ordered]


def _group(category: str) -> str | None:
    return "mt_bench" if category in MT_BENCH else category if category in GROUPS[1:] else None


def in_turn(lists: Iterable[list[T]]) -> list[T]:
    """The first of each, then the second of each, ..."""
    return [item for each in zip_longest(*lists) for item in each if item is not None]
