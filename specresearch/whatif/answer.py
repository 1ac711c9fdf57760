"""The answer to "what if": the numbers that a run with another tree would have given, and how well they are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from specresearch.metrics import Line, ratio
from specresearch.results import Results
from specresearch.types import TreePolicy
from specresearch.whatif.book import Book, of_dense, of_trace
from specresearch.whatif.grow import Lengths, lengths
from specresearch.whatif.price import Prices
from specresearch.whatif.walk import Walk, hazards, walk

EXACT, BOUNDED, ESTIMATE, EXPECTED = "exact", "bounded", "estimate", "expected"


@dataclass(frozen=True)
class Recording:
    """What was recorded of a run: at every place of the answers (dense), or at the starts of its steps."""

    run: Results
    lines: Sequence[Line]
    policy: TreePolicy  # the run's own
    dense: bool

    @property
    def temperature(self) -> float:
        return float(self.run.summary["config"]["temperature"])

    def book(self, line: Line, levels: int) -> Book:
        own = self.policy
        if self.dense:
            return of_dense(line, own.width, levels)
        return of_trace(line, own.size, own.depth, own.width, levels)


@dataclass(frozen=True)
class Answer:
    """`kind`: exact (every step is known), bounded (all but some), estimate (a plain trace), expected (sampled text)."""

    kind: str
    mean_accepted_length: float | None
    lowest: float | None  # bounds of it
    highest: float | None
    histogram: dict[str, float]  # of accepted lengths: steps
    by_kind: dict[str, float | None]  # accepted length by kind of prompt
    steps: float
    tokens: int
    unknown: float | None  # share of the steps that start where the trace does not tell
    ties: int  # places where the drafter's best tokens were equal, so that their order is anyone's guess
    tokens_per_second: float | None
    speedup: float | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def answers(
    recording: Recording, policies: Sequence[TreePolicy], prices: Prices | None, tick: Callable[[], None] = lambda: None
) -> list[Answer]:
    """One for each policy. The books are large, so only one is held at a time; `tick` is called after each
    of its policies."""
    levels = max(policy.depth for policy in policies)
    found: list[list[Lengths]] = [[] for _ in policies]
    asked, ties = [], 0
    with torch.inference_mode():
        for line in recording.lines:
            book = recording.book(line, levels)
            asked.append(book.known & book.first)
            ties += tied(book)
            for policy, lists in zip(policies, found):
                lists.append(lengths(policy, book, *_relation(policy, recording)))
                tick()
    return [_answer(recording, policy, lists, asked, ties, prices) for policy, lists in zip(policies, found)]


def _relation(policy: TreePolicy, recording: Recording) -> tuple[bool, bool]:
    """Of a tree to what an ordinary trace kept of the run's own -> whether it is `nested` and `within` (see `lengths`)."""
    own = recording.policy
    if recording.dense or policy.growth == "static":
        return False, False
    nested = type(policy) is type(own) and policy.width == own.width
    return nested, policy.size <= own.size and policy.depth <= own.depth and policy.width <= own.width


def _answer(
    recording: Recording,
    policy: TreePolicy,
    found: Sequence[Lengths],
    asked: Sequence[Tensor],
    ties: int,
    prices: Prices | None,
) -> Answer:
    by_kind = walks([line["kind"] for line in recording.lines], list(zip(found, asked)), policy.depth)
    whole = Walk()
    for one in by_kind.values():
        whole.add(one)
    tokens = whole.emitted + len(found)
    speed = ratio(tokens, prices.seconds(whole, policy.size, policy.depth, policy.width)) if prices else None
    ran = recording.run.summary  # a job of a sweep times plain decoding on a part of its questions only
    plain = ratio(ran["tokens_per_second"] or 0.0, ran["speedup"] or 0.0)
    return Answer(
        _kind(recording, whole),
        ratio(whole.emitted, whole.steps),
        ratio(whole.emitted, whole.most),
        ratio(whole.emitted, whole.fewest),
        {str(length): whole.histogram[length] for length in sorted(whole.histogram)},
        {kind: ratio(one.emitted, one.steps) for kind, one in by_kind.items()},
        whole.steps,
        tokens,
        ratio(whole.unknown, whole.steps),
        ties,
        speed,
        speed / plain if speed and plain else None,
    )


def walks(kinds: Sequence[str], found: Sequence[tuple[Lengths, Tensor]], depth: int) -> dict[str, Walk]:
    """The walks of each kind of prompt, added up; what is open there goes on as the known places of its kind do."""
    pooled = hazards(found, depth)
    out: dict[str, Walk] = {}
    for kind in dict.fromkeys(kinds):
        own = [pair for pair, name in zip(found, kinds) if name == kind]
        hazard = hazards(own, depth, pooled)
        out[kind] = Walk()
        for one, _ in own:
            out[kind].add(walk(one, hazard))
    return out


def _kind(recording: Recording, whole: Walk) -> str:
    if recording.temperature > 0:
        return EXPECTED if recording.dense else ESTIMATE
    if whole.fewest == whole.most:
        return EXACT
    return BOUNDED if recording.dense else ESTIMATE


def tied(book: Book) -> int:
    """Places at which two children of one node had the same probability."""
    best = book.logp.sort(-1, descending=True).values
    return int(((best[..., 1:] == best[..., :-1]) & (best[..., 1:] > -torch.inf)).flatten(1).any(1).sum())
