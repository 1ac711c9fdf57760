"""What a search needs to know, measured once: acceptance at every place, the target's pass by size, all else by depth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specresearch.baseline import plain_of
from specresearch.conversations import Conversations, Settings, required_capacity
from specresearch.decode import Decoder, Parts
from specresearch.prompts import Question
from specresearch.results import read, read_lines
from specresearch.run import Run
from specresearch.trees.dynamic import DynamicTree
from specresearch.whatif.answer import Recording
from specresearch.whatif.price import Prices, by_size, prices_of

ROUNDS = 3
PROBE_TOKENS = 24


def dynamic(tree: Mapping[str, Any]) -> DynamicTree:
    return DynamicTree(temperature=0, **{key: tree[key] for key in ("depth", "topk", "size")})


def depths_to_measure(depth: int) -> list[int]:
    return sorted({1, min(2, depth), depth})


def record(run: Run, config: Mapping[str, Any], save: Callable[[Path, dict[str, Any]], None]) -> None:
    """The run over the largest tree, its drafter asked at every place; nothing is left to do if it is complete."""
    done = run.folder / "summary.json"
    if not done.exists():
        run.execute()
        save(done, run.summary() | run.costs() | {"config": config, "provenance": {}})


def recorded(folder: Path, policy: DynamicTree) -> Recording:
    return Recording(read(folder), read_lines(folder / "dense.jsonl"), policy, dense=True)


# -- drafting by depth -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """Short decodings with one tree; seconds, the median over the rounds."""

    depth: int
    topk: int
    beside: float  # of a pass without the target's part
    reading: float  # of the drafter, for each token of a prompt


def probe(parts: Parts, questions: Sequence[Question], settings: Settings, largest: DynamicTree) -> list[Probe]:
    """What drafting costs by depth, for chains and for trees of the largest topk, and plain decoding (depth 0), in turns."""
    shapes = [(depth, topk) for depth in depths_to_measure(largest.depth) for topk in sorted({1, largest.topk})]
    trees = [DynamicTree(depth=d, topk=k, size=largest.size if k > 1 else d + 1, temperature=0) for d, k in shapes]
    short = replace(settings, max_new_tokens=PROBE_TOKENS, trace={"dense": False}, stop=[])
    few = [replace(question, turns=question.turns[:1]) for question in questions[: max(2, settings.batch_size)]]
    capacity = required_capacity(parts.target, few, short)
    slots = max(max(tree.asked, tree.size) for tree in trees)
    parts.target.reserve(settings.batch_size, capacity, slots)
    parts.drafter.reserve(settings.batch_size, capacity, slots)
    variants = [plain_of(parts), *(replace(parts, policy=tree) for tree in trees)]
    seen: list[list[tuple[float, float]]] = [[] for _ in variants]
    for number in range(ROUNDS + 1):
        for variant, times in zip(variants, seen):
            once = _timed(variant, few, short, capacity)
            if number and once is not None:  # the first round warms up
                times.append(once)
    medians = [[statistics.median(each) for each in zip(*times)] for times in seen]
    return [Probe(d, k, *found) for (d, k), found in zip([(0, 1), *shapes], medians) if found]


def _timed(
    parts: Parts, questions: Sequence[Question], settings: Settings, capacity: int
) -> tuple[float, float] | None:
    """-> seconds of a pass beside the target's part, and of the drafter's reading for each token of a prompt."""
    kwargs = {"batch": settings.batch_size, "capacity": capacity, "seed": settings.seed}
    decoder = Decoder(parts, **kwargs, decode=parts.target.text, stop=())
    clock, before, reading, tokens = decoder.clock, 0.0, 0.0, 0
    began = time.perf_counter()
    for emission in decoder.run(Conversations(parts.target, questions, settings, capacity)):
        now = clock.seconds["draft"]
        if not emission.turn.steps:  # a prompt was read
            reading += now - before
            tokens += len(emission.turn.job.prompt_ids)
        before = now
    wall = time.perf_counter() - began
    if not decoder.passes:
        return None
    return (wall - clock.seconds["target"] - clock.seconds["prefill"] - reading) / decoder.passes, reading / tokens


# -- prices ----------------------------------------------------------------------------------------------------------------


def prices(own: Recording, probes: Sequence[Probe]) -> Prices | None:
    """The recording's own prices, with drafting as the short decodings had it, and the target's pass anchored at both ends: at
    one node in plain decoding, at the largest tree in the recording. Medians, since a machine may stall for seconds."""
    found = prices_of(own.run, own.policy.depth, own.policy.size)
    if found is None or not any(one.depth for one in probes):
        return None
    table: dict[int, dict[int, float]] = {}
    for one in probes:
        if one.depth:
            table.setdefault(one.topk, {})[one.depth] = one.beside
    reading = statistics.median(one.reading for one in probes if one.depth)
    reading *= sum(len(line["prompt_ids"]) for line in own.lines)
    target, (small, large) = _anchored(found, own)
    source = (
        f"target passes by tree size, scaled by {small:.2f} at one node and {large:.2f} at {own.policy.size} to what they "
        "took in the run; the rest of a step from short decodings by depth and topk"
    )
    return replace(found, target=target, beside=table, prefill=_prompts(own) + reading, source=source)


def plain_seconds(own: Recording, probes: Sequence[Probe], found: Prices) -> float:
    """Of plain decoding of the same answers, by the same prices: the drafter reads no prompt there."""
    passes = sum(block["baseline"]["target_passes"] for block in own.run.blocks)
    (beside,) = (one.beside for one in probes if not one.depth)
    return _prompts(own) + passes * (by_size(found.target, 1) + beside)


def _prompts(own: Recording) -> float:
    """Seconds of all prompts, read twice in each block."""
    modes = ("baseline", "speculative")
    return sum(min(block[mode]["time"]["prefill"] for mode in modes) for block in own.run.blocks)


def _anchored(found: Prices, own: Recording) -> tuple[dict[float, float], tuple[float, float]]:
    """-> the target's prices, and the factors at both ends."""
    measured = {float(n) * found.passes_per_step: s for n, s in own.run.summary["costs"]["target"].items()}
    ends = []
    for mode, nodes in (("baseline", 1), ("speculative", own.policy.size)):
        each = [block[mode] for block in own.run.blocks if block[mode]["target_passes"]]
        ran = statistics.median(one["time"]["target"] / one["target_passes"] for one in each)
        ends.append(ran / by_size(measured, nodes))
    factor = {1: ends[0], own.policy.size: ends[1]}
    return {nodes: seconds * by_size(factor, nodes) for nodes, seconds in measured.items()}, (ends[0], ends[1])
