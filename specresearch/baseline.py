"""Plain answers that the jobs of a sweep share. Their ids are reused, by content; their times are measured in every job."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from specresearch.conversations import Conversations
from specresearch.decode import Job, Parts, Turn
from specresearch.drafters.none import NoDrafter
from specresearch.metrics import Line
from specresearch.prompts import Question
from specresearch.trees.static import StaticTree

TIMED_PROMPTS = 8  # questions that each job decodes plainly again, interleaved with its own
TIMED_BLOCKS = 2  # ... in at least so many blocks, so that either mode is the first once


def plain_of(parts: Parts) -> Parts:
    """The same with nothing drafted."""
    return replace(parts, drafter=NoDrafter(parts.target), policy=StaticTree(temperature=0, parents=[-1]))


class Answers:
    """A folder with one file an answer. What an answer depends on is in its name, so nothing has to be invalidated.

    `origin` names what all of them depend on: target and kernels, sampling, stop, seed, and the batch size (other numbers
    of rows round otherwise). Writing is atomic: jobs in other processes read whole answers or none.
    """

    def __init__(self, folder: Path, origin: Any):
        self.folder, self.origin = folder, repr(origin)

    def recall(self, jobs: Conversations) -> list[Line] | None:
        """The answers to all turns of some questions; None if one is missing. A later turn is looked up by its own prompt,
        which holds the plain answer to the one before."""
        lines = []
        for job in jobs:
            turn = self._get(job)
            if turn is None:
                return None
            jobs.answered(turn)
            lines.append(turn.line())
        return lines

    def keep(self, lines: Sequence[Line], budgets: dict[tuple[Any, int], int]) -> None:
        """`budgets` by question and turn: most tokens that an answer could have had."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for line in lines:
            place = (line["id"], line["turn"])
            path = self._path(Job(line["id"], "", line["turn"], line["prompt_ids"], budgets[place]))
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps({key: line[key] for key in ("output_ids", "text", "finish")}))
            scratch.replace(path)

    def _get(self, job: Job) -> Turn | None:
        try:
            kept = json.loads(self._path(job).read_text())
            return Turn(job, kept["output_ids"], kept["text"], kept["finish"])
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or one that a crash left behind
            return None

    def _path(self, job: Job) -> Path:
        content = repr((self.origin, job.id, job.turn, job.prompt_ids, job.budget))
        return self.folder / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"


def interleaved(blocks: Sequence[Sequence[Question]]) -> set[int]:
    """The blocks to be timed in both modes, the same ones in every job: the kinds of prompt in turn, from different parts of
    the run, so that its speedup is no kind's and no moment's alone."""
    chosen: set[int] = set()
    for index in _by_kind(blocks):
        if sum(len(blocks[i]) for i in chosen) >= TIMED_PROMPTS and len(chosen) >= TIMED_BLOCKS:
            break
        chosen.add(index)
    return chosen


def _by_kind(blocks: Sequence[Sequence[Question]]) -> Iterator[int]:
    queues: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        queues.setdefault(block[0].kind, []).append(index)
    for turn in count():
        if turn == len(blocks):
            return
        for place, queue in enumerate(queues.values()):
            if turn < len(queue):
                yield queue[(place + turn) % len(queue)]
