"""Numbers that summary.json lacks, counted from the trace and the blocks. A node is named by the ranks on its path:
(1, 2) is the second child, in try order, of the root's first child."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from specresearch.metrics import Block, Line

Ranks = tuple[int, ...]
PARTS = ("prefill", "draft", "target", "verify", "commit", "other")


@dataclass(frozen=True)
class Tally:
    """Over all steps."""

    steps: int
    drafted: Counter[Ranks]  # steps whose tree had this node
    accepted: Counter[Ranks]  # steps that kept it
    offered: Counter[int]  # nodes on an accepted path that had a child of this rank
    taken: Counter[int]  # ... and that child was kept


def tally(lines: Sequence[Line]) -> Tally:
    """Equal shapes are counted first and walked once: a run of 200,000 steps has few distinct ones."""
    shapes: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for step in (step for line in lines for step in line["steps"]):
        real = (parent if token >= 0 else -2 for parent, token in zip(step["parent"], step["tokens"]))
        shapes[tuple(real), tuple(step["path"])] += 1
    found = Tally(sum(shapes.values()), Counter(), Counter(), Counter(), Counter())
    for (parents, path), count in shapes.items():
        _walk(found, parents, path, count)
    return found


def _walk(found: Tally, parents: tuple[int, ...], path: tuple[int, ...], count: int) -> None:
    kept, children = set(path), Counter[int]()
    names: dict[int, Ranks] = {0: ()}
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        children[parent] += 1
        rank = children[parent]
        names[node] = (*names[parent], rank)
        found.drafted[names[node]] += count
        found.accepted[names[node]] += count * (node in kept)
        if parent in kept:
            found.offered[rank] += count
            found.taken[rank] += count * (node in kept)


def likeliest(found: Tally, most: int) -> list[Ranks]:
    """Nodes kept most often, then drafted most often. A parent is never behind its children, so none is cut off."""
    order = sorted(found.drafted, key=lambda n: (-found.accepted[n], -found.drafted[n], len(n), n))
    return order[:most]


def part_seconds(blocks: Sequence[Block], mode: str = "speculative") -> dict[str, float]:
    """Seconds by part; `other` is what the parts leave of the wall time."""
    done = [block[mode] for block in blocks if mode in block]
    parts = {part: sum(each["time"].get(part, 0.0) for each in done) for part in PARTS[:-1]}
    return parts | {"other": max(sum(each["seconds"] for each in done) - sum(parts.values()), 0.0)}


@dataclass(frozen=True)
class Bin:
    """Consecutive steps: their middle, and the times that leave a tenth on either side."""

    step: float
    low: float
    middle: float
    high: float
    count: int


def step_times(lines: Sequence[Line], bins: int = 90) -> list[Bin]:
    """Milliseconds of the steps, in the trace's order."""
    times = [step["ms"] for line in lines for step in line["steps"]]
    size = max(-(-len(times) // bins), 1)
    return [_bin(start, sorted(times[start : start + size])) for start in range(0, len(times), size)]


def _bin(start: int, times: list[float]) -> Bin:
    tenth = len(times) // 10
    return Bin(start + (len(times) + 1) / 2, times[tenth], median(times), times[-1 - tenth], len(times))


def decode_cost(blocks: Sequence[Block], steps: int) -> dict[str, float] | None:
    """What one step costs by part, in plain decoding's seconds per token, prompts left out; None without a baseline."""
    timed = [block for block in blocks if "time" in block.get("baseline", ())]
    tokens = sum(block["baseline"]["tokens"] - block["answers"] for block in timed)
    plain = part_seconds(timed, "baseline")
    seconds = sum(plain.values()) - plain["prefill"]
    if not steps or tokens <= 0 or seconds <= 0:
        return None
    own = part_seconds(blocks)
    return {part: own[part] / steps / (seconds / tokens) for part in PARTS[1:]}
