"""On-policy data from the target alone: it writes a user turn, then answers it; many rows at once, each at its own place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specresearch.models.hf import HFModel
from specresearch.training import dataset
from specresearch.training.dataset import Dialogue
from specresearch.training.lean import stepper
from specresearch.training.openings import LONG, Opening, Sources, draw
from specresearch.training.origin import Origin, mark
from specresearch.training.overlap import Overlap, fingerprint, grams, loop_start
from specresearch.types import Tap, UserError

HELD_OUT = 25  # one user turn in so many is held out
TOP_K = 128  # of what is sampled; a sort of the whole vocabulary would cost as much as the model
SEEN_SHARE = 0.5  # a user turn with more word runs than this in earlier ones is a repetition
PATIENCE = 10  # refusals for each row, none used between them, after which a target is taken to write no usable turns
WHY = {
    "long": "never ended within data.turn_tokens",
    "loop": "ran into a loop",
    "room": "left no room for an answer",
    "short": "were nearly empty",
    "evaluation": "were evaluation prompts",
    "repeated": "had been written before",
    "similar": "resembled earlier ones",
    "answer": "had answers of under 8 tokens",
}
MARK = "\ue001"


@dataclass(frozen=True)
class Plan:
    """What to make. `rows` of `slots` tokens for short user turns, and for those that quote a text."""

    tokens: int  # of answers, in all
    short_rows: int
    short_slots: int
    long_rows: int
    long_slots: int
    turn_tokens: int  # most tokens that the target adds to a user turn
    answer_tokens: int
    greedy: float  # share of answers at temperature 0; the others at one of `temperatures`
    temperatures: tuple[float, ...]
    top_p: float
    seed: int
    shard: int  # dialogues in a shard
    features: bool


@dataclass
class Row:
    opening: Opening
    tokens: list[int]
    turn: int
    temperature: float
    given: list[int] = field(default_factory=list)  # tokens to feed before the target chooses again
    sampled: int = 0
    turn_end: int = 0
    answer: int = 0  # 0 while the user turn is being written
    held_out: bool = False


class Book:
    """What has been made: refuses repetitions, knows what may be quoted, and is rebuilt from the shards."""

    def __init__(self, target: HFModel, banned: Overlap):
        self.target, self.banned = target, banned
        self.prints: set[int] = set()
        self.runs: set[int] = set()
        self.sources = Sources()
        self.counts: Counter[str] = Counter()
        self.known: set[Path] = set()

    def catch_up(self, folder: Path) -> None:
        """Read the shards that are new, from an earlier run or from a process that works beside this one."""
        for path in dataset.shards(folder):
            if path not in self.known:
                self.known.add(path)
                for d in dataset.read(path).dialogues:
                    self.add(d)

    def text(self, tokens: list[int]) -> str:
        return self.target.text(tokens).strip()

    def admit(self, turn: str, closed: bool) -> str | None:
        """None if this user turn is new and may be used, else why not."""
        if len(turn) < 8:
            return "short"
        if self.banned(turn):
            return "evaluation"
        if fingerprint(turn) in self.prints:
            return "repeated"
        own = grams(turn, 5)
        if not closed and len(own & self.runs) > SEEN_SHARE * len(own):
            return "similar"
        return None

    def add(self, d: Dialogue) -> None:
        turn = self.text(d.tokens[d.turn : d.answer])
        self.prints.add(fingerprint(turn))
        self.runs |= grams(turn, 5)
        self.sources.learn(self.text(d.tokens[d.answer :]), d.held_out)
        self.counts["dialogues"] += 1
        self.counts["tokens"] += len(d.tokens)
        self.counts["answer_tokens"] += len(d.tokens) - d.answer
        self.counts[d.kind] += 1


def wrapping(target: HFModel) -> tuple[list[int], list[int]]:
    """Tokens before and after a user turn, by the chat template."""
    tokenizer = target.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        return [], tokenizer("\n", add_special_tokens=False).input_ids
    message = [{"role": "user", "content": MARK}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, after = text.split(MARK)
    return [tokenizer(part, add_special_tokens=False).input_ids for part in (before, after)]  # type: ignore[return-value]


Source = Callable[[random.Random, Sources, bool], Opening | None]  # the last says whether long turns are wanted


class Generator:
    """Rows that each write dialogue after dialogue; `run` saves a shard whenever enough are done.

    `source` gives the openings; when it has no more (None), the rows run dry.
    """

    def __init__(
        self, target: HFModel, plan: Plan, book: Book, folder: Path, taps: tuple[Tap, ...], source: Source | None = None
    ):
        self.target, self.plan, self.book, self.folder, self.taps = target, plan, book, folder, taps
        self.source = source or (lambda chance, sources, long: draw(chance, sources, long, 1 / HELD_OUT))
        self.before, self.after = wrapping(target)
        groups = [(r, s) for r, s in ((plan.short_rows, plan.short_slots), (plan.long_rows, plan.long_slots)) if r]
        self.slots = [slots for rows, slots in groups for _ in range(rows)]
        self.stepper = stepper(target, groups, taps, self.before)
        book.catch_up(folder)
        start = len(book.known)
        self.chance = random.Random(f"{plan.seed} {start}")
        self.dice = torch.Generator(device=target.device).manual_seed(plan.seed * 100_003 + start)
        self.special = set(target.tokenizer.all_special_ids)
        self.mark = mark(Origin.of(target))
        self.features: Tensor | None = None
        self.done: list[Dialogue] = []
        self.refused: Counter[str] = Counter()
        self.patience = (
            max(100, PATIENCE * len(self.slots)) if source is None else None
        )  # given prompts come to an end by themselves
        self.in_a_row: Counter[str] = Counter()  # refusals since the last dialogue
        self.rows = [self._begin(row) for row in range(len(self.slots))]

    def run(self, progress: Callable[[Generator], None] | None = None) -> None:
        """Until there are `plan.tokens` answer tokens in all. An interrupted run leaves whole shards.

        Raises UserError where one turn after the other is refused.
        """
        try:
            while self.book.counts["answer_tokens"] < self.plan.tokens and any(self.rows):
                self.step()
                if len(self.done) >= self.plan.shard:
                    self.flush()
                if progress:
                    progress(self)
        finally:
            self.flush()

    def flush(self) -> None:
        if self.done:
            taps = self.taps if self.plan.features else ()
            self.book.known.add(dataset.write(self.folder, self.done, self.target.vocab_size, taps, self.mark))
            self.done = []
        self.book.catch_up(self.folder)

    # -- one step ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> None:
        """Feed each row's newest token; where nothing is given to follow it, let the target choose."""
        device = self.target.device
        length = torch.tensor([len(r.tokens) - 1 if r else 0 for r in self.rows], device=device)
        tokens = torch.tensor([r.tokens[-1] if r else 0 for r in self.rows], device=device)
        choosing = [i for i, r in enumerate(self.rows) if r and not r.given]
        logits, features = self.stepper.step(tokens, length, torch.tensor(choosing, dtype=torch.long, device=device))
        if self.plan.features:
            self._keep(length, features)
        chosen = dict(zip(choosing, self._choose(logits, [row for i in choosing if (row := self.rows[i])])))
        for i, row in enumerate(self.rows):
            if row is None:
                continue
            if row.given:
                row.tokens.append(row.given.pop(0))
            else:
                self._take(i, row, chosen[i])

    def _keep(self, length: Tensor, features: Tensor) -> None:
        if self.features is None:
            shape = (len(self.rows), max(self.slots), features.shape[-1])
            self.features = torch.zeros(shape, dtype=torch.bfloat16, device=features.device)
            for i in range(len(self.rows)):
                self._start(i)
        self.features[torch.arange(len(self.rows), device=length.device), length] = features.to(torch.bfloat16)

    def _choose(self, logits: Tensor, rows: list[Row]) -> list[int]:
        heat = torch.tensor([r.temperature if r.answer else 1.0 for r in rows], device=logits.device)
        best = logits.argmax(-1)
        warm = heat.nonzero()[:, 0]
        if len(warm):
            scaled = logits[warm].float() / heat[warm, None]
            top, index = scaled.topk(min(TOP_K, scaled.shape[-1]), -1)
            probs = (top - scaled.logsumexp(-1, keepdim=True)).exp()
            outside = probs.cumsum(-1) - probs >= self.plan.top_p
            drawn = torch.multinomial(probs.masked_fill(outside, 0), 1, generator=self.dice)
            best[warm] = index.gather(-1, drawn)[:, 0]
        return best.tolist()

    def _take(self, i: int, row: Row, token: int) -> None:
        if not row.answer:
            self._take_turn(i, row, token)
            return
        row.tokens.append(token)
        own = row.tokens[row.answer :]
        again = loop_start(own)
        if again is not None:
            del row.tokens[row.answer + again :]
        if (
            token in self.target.eos
            or again is not None
            or self._full(row, own, self.plan.answer_tokens, self.slots[i])
        ):
            self._finish(i, row)

    def _take_turn(self, i: int, row: Row, token: int) -> None:
        """A user turn ends where the target ends it; one that runs on or into a loop is given up."""
        own = row.tokens[row.sampled :]
        room = self.slots[i] - self.plan.answer_tokens // 2 - len(self.after)
        if token in self.target.eos:
            self._answer(i, row)
        elif token in self.special or self._full(row, own, self.plan.turn_tokens, room):
            self._refuse(i, "long")
        else:
            row.tokens.append(token)
            if loop_start(row.tokens[row.sampled :]) is not None:
                self._refuse(i, "loop")

    @staticmethod
    def _full(row: Row, own: list[int], most: int, slots: int) -> bool:
        return len(own) >= most or len(row.tokens) >= slots

    def _answer(self, i: int, row: Row) -> None:
        turn = self.book.text(row.tokens[row.turn :])
        reason = self.book.admit(turn, row.opening.closed)
        if reason:
            self._refuse(i, reason)
            return
        row.held_out = row.opening.held_out or (not row.opening.closed and fingerprint(turn) % HELD_OUT == 0)
        row.tokens.append(self.after[0])
        row.turn_end = len(row.tokens)
        row.given = self.after[1:]
        row.answer = len(row.tokens) + len(row.given)

    def _refuse(self, i: int, reason: str) -> None:
        self._count(reason)
        self.rows[i] = self._begin(i)

    def _count(self, reason: str) -> None:
        self.refused[reason] += 1
        self.in_a_row[reason] += 1
        if self.patience is not None and (times := self.in_a_row.total()) >= self.patience:
            why = ", ".join(f"{count} {WHY[name]}" for name, count in self.in_a_row.most_common(3))
            raise UserError(
                f"{times} user turns of {self.target.name} in a row could not be used ({why}): give it prompts, "
                "data=file data.path=FILE, or raise data.turn_tokens"
            )

    def _finish(self, i: int, row: Row) -> None:
        answer = self.book.text(row.tokens[row.answer :])
        if len(row.tokens) - row.answer < 8 or self.book.banned(answer):
            self._refuse(i, "answer")
            return
        features = None
        if self.plan.features and self.features is not None:
            features = self.features[i, : len(row.tokens)].clone()
            features[-1] = 0  # the newest token was not fed
        d = Dialogue(
            *(row.tokens, row.turn, row.sampled, row.turn_end, row.answer),
            *(row.opening.kind, row.temperature, row.held_out, features),
        )
        self.book.add(d)
        self.done.append(d)
        self.in_a_row.clear()
        self.rows[i] = self._begin(i)

    def _begin(self, i: int) -> Row | None:
        """A new dialogue in row i; None if there is no opening left."""
        row = None
        while row is None:
            opening = self.source(self.chance, self.book.sources, i >= self.plan.short_rows)
            if opening is None:
                return None
            row = self._opened(opening, self.slots[i])
        self._start(i)
        return row

    def _opened(self, opening: Opening, slots: int) -> Row | None:
        tokenizer, turn = self.target.tokenizer, len(self.before)
        given = list(tokenizer(opening.text, add_special_tokens=False).input_ids)
        greedy = self.chance.random() < self.plan.greedy
        heat = 0.0 if greedy else self.chance.choice(self.plan.temperatures)
        if opening.closed:
            if (reason := self.book.admit(opening.text, True)) is not None:
                self._count(reason)
                return None
            given = given + self.after
        tokens = self.before + given
        if not tokens:
            return None
        if len(tokens) + self.plan.answer_tokens // 2 + 8 > slots:
            self._count("room")
            return None
        first = max(len(self.before), 1)
        row = Row(opening, tokens[:first], turn, heat, tokens[first:], sampled=len(tokens))
        if opening.closed:
            row.turn_end = row.answer = len(tokens)
            row.held_out = opening.held_out or (opening.kind not in LONG and fingerprint(opening.text) % HELD_OUT == 0)
        return row

    def _start(self, i: int) -> None:
        prefix = self.stepper.start(i)
        if prefix is not None and self.features is not None:
            self.features[i, : len(prefix)] = prefix.to(torch.bfloat16)
