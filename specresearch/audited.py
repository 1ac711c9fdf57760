"""Where the tokens to be judged come from: our own loop, transformers' generation, or the log of any server.

Each is an endless or finite stream of trace lines, {id, turn, prompt_ids, output_ids}, of the questions asked over and over
with other seeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from specresearch.conversations import Conversations, Settings, required_capacity
from specresearch.decode import Decoder, Parts, Turn
from specresearch.metrics import Line
from specresearch.models.hf import HFModel, one_line
from specresearch.models.loading import load
from specresearch.prompts import Question
from specresearch.rng import row_key
from specresearch.sampling import Sampler
from specresearch.types import Target, UserError

WITHOUT = ("none", "lookup")


def own(parts: Parts, questions: Sequence[Question], settings: Settings, first: int = 0) -> Iterator[Line]:
    """Answers of our loop, round after round from `first` on, in the order of the questions: in that of completion, to stop
    somewhere would favour short answers, and with them the tokens that end one."""
    capacity = required_capacity(parts.target, questions, settings)
    slots = max(parts.policy.asked, parts.policy.size)
    parts.target.reserve(settings.batch_size, capacity, slots)
    parts.drafter.reserve(settings.batch_size, capacity, slots)
    while True:
        now = replace(settings, seed=settings.seed + first)
        jobs = Conversations(parts.target, questions, now, capacity)
        target = parts.target
        decoder = Decoder(parts, batch=now.batch_size, capacity=capacity, seed=now.seed, decode=target.text, stop=[])
        order = deque((q.id, turn) for q in questions for turn in range(len(q.turns)))
        done: dict[tuple[int | str, int], Line] = {}
        for emission in decoder.run(jobs):
            if emission.done:
                jobs.answered(emission.turn)
                done[emission.turn.job.id, emission.turn.job.turn] = emission.turn.line()
            while order and order[0] in done:
                yield done.pop(order.popleft())
        yield from (done[key] for key in order if key in done)  # behind turns that had no room
        first += 1


class Generation:
    """transformers' `generate`: plain, with prompt lookup, or with an assistant model of the same or another vocabulary."""

    def __init__(self, target: Target, assistant: str):
        if not isinstance(target, HFModel):
            raise UserError("engine=hf needs a target that transformers loads")
        self.target = target
        if assistant in WITHOUT:
            self.extra = {"prompt_lookup_num_tokens": 10} if assistant == "lookup" else {}
            return
        helper = load(id=assistant, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device))
        self.extra = {"assistant_model": helper.model}
        ours, theirs = target.tokenizer, helper.tokenizer
        if ours is None or theirs is None or ours.get_vocab() != theirs.get_vocab():
            self.extra |= {"tokenizer": ours, "assistant_tokenizer": theirs}

    def answers(
        self, questions: Sequence[Question], settings: Settings, sampler: Sampler, first: int = 0
    ) -> Iterator[Line]:
        capacity = required_capacity(self.target, questions, settings)
        while True:
            jobs = Conversations(self.target, questions, settings, capacity)
            for job in jobs:
                torch.manual_seed(row_key(settings.seed + first, job.id, job.turn))
                try:
                    ids = self.target.generate(job.prompt_ids, job.budget, sampler, [], **self.extra)
                except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                    raise UserError(
                        f"transformers' generate fails: {type(error).__name__}: {one_line(error)}"
                    ) from error
                turn = Turn(job, ids, self.target.text(ids))
                jobs.answered(turn)
                yield turn.line()
            first += 1
