"""From questions to jobs: what the run's settings are, and which turn can be answered next."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specresearch.decode import Job, Turn
from specresearch.prompts import Question
from specresearch.types import Target, UserError


@dataclass(frozen=True)
class Settings:
    """The root keys of the configuration that the run itself reads."""

    seed: int
    limit: int | None
    max_new_tokens: int
    batch_size: int
    stop: Sequence[str]
    baseline: bool | str
    check: bool
    profile: bool
    log: str | None = None
    trace: Mapping[str, bool] = field(
        default_factory=lambda: {"dense": False}, repr=False
    )  # no part of what is answered

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size", "limit"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "limit" and value is None):
                or_null = ", or null for all questions" if name == "limit" else ""
                raise UserError(f"{name}={value}: use a whole number of at least 1{or_null}")
        if type(self.seed) is not int:
            raise UserError(f"seed={self.seed}: use a whole number")
        if self.baseline not in (True, False, "hf") or type(self.baseline) is int:
            raise UserError(f"baseline={self.baseline} is unknown: use true, false or hf")
        for name in ("check", "profile"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)}: use true or false")
        if self.log not in (None, "whitebox"):
            raise UserError(f"log={self.log} is unknown: use whitebox, or null for none")
        if not isinstance(self.trace, Mapping) or not all(isinstance(on, bool) for on in self.trace.values()):
            raise UserError(f"trace={self.trace}: use trace.dense=true or trace.dense=false")
        if not isinstance(self.stop, list | tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise UserError(f"stop={self.stop!r}: use a list of texts, none of them empty, e.g. 'stop=[\"END\"]'")
        # The command line has no way to write a line break or a tab but this.
        plain = [s.replace("\\n", "\n").replace("\\t", "\t") for s in self.stop]
        object.__setattr__(self, "stop", plain)


class Conversations:
    """The jobs of some questions, as an iterator that may run dry and fill again: a next turn waits for the answer."""

    def __init__(self, target: Target, questions: Sequence[Question], settings: Settings, capacity: int):
        self.target, self.settings, self.capacity = target, settings, capacity
        self.messages: dict[int | str, list[dict[str, str]]] = {q.id: [] for q in questions}
        self.left = {q.id: deque(q.turns) for q in questions}
        self.kinds = {q.id: q.kind for q in questions}
        self.ready: deque[Job] = deque()
        self.skipped: list[str] = []
        for q in questions:
            self._push(q.id, 0)

    def _push(self, id: int | str, turn: int) -> None:
        self.messages[id].append({"role": "user", "content": self.left[id].popleft()})
        ids = self.target.chat(self.messages[id])
        room = self.capacity - len(ids)
        if room >= 1:
            job = Job(id, self.kinds[id], turn, ids, min(self.settings.max_new_tokens, room))
            # A next turn goes first: its row is the one that has just become free.
            self.ready.appendleft(job) if turn else self.ready.append(job)
        else:
            self.skipped.append(f"question {id} turn {turn + 1}: its {len(ids)} tokens leave no room in the context")

    def __iter__(self) -> Conversations:
        return self

    def __next__(self) -> Job:
        if not self.ready:
            raise StopIteration
        return self.ready.popleft()

    def answered(self, turn: Turn) -> None:
        job = turn.job
        self.messages[job.id].append({"role": "assistant", "content": turn.text})
        if self.left[job.id]:
            self._push(job.id, job.turn + 1)


def required_capacity(target: Target, questions: Sequence[Question], settings: Settings) -> int:
    """Most tokens a row must hold. Raises UserError where a first turn and the budget exceed the context."""
    most = 1
    for q in questions:
        first = len(target.chat([{"role": "user", "content": q.turns[0]}]))
        need = first + settings.max_new_tokens
        if need > target.context:
            raise UserError(
                f"question {q.id} has {first} tokens and max_new_tokens={settings.max_new_tokens} more do not fit into the "
                f"context of {target.context}: lower max_new_tokens or shorten the prompt"
            )
        for turn in q.turns[1:]:
            # An answer that is put back into a prompt may have some tokens more than when it was made.
            again = settings.max_new_tokens // 4 + 16
            need += len(target.chat([{"role": "user", "content": turn}])) + settings.max_new_tokens + again
        most = max(most, min(need, target.context))
    return most
