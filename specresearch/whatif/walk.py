"""From what each place would emit to the steps of an answer: the walk itself where all is known, else its mean and bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specresearch.whatif.grow import Lengths


@dataclass
class Walk:
    """Of one answer, or of several added up. Expected numbers are whole where everything on the way is known."""

    emitted: int = 0  # tokens, the prefill's excepted
    steps: float = 0.0
    fewest: int = 0
    most: int = 0
    unknown: float = 0.0  # steps at places where the length is not known
    histogram: Counter[int] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)  # steps by nodes in the tree

    def add(self, other: Walk) -> None:
        self.emitted += other.emitted
        self.steps += other.steps
        self.fewest += other.fewest
        self.most += other.most
        self.unknown += other.unknown
        self.histogram.update(other.histogram)
        self.sizes.update(other.sizes)


def walk(found: Lengths, hazard: Sequence[float]) -> Walk:
    """`hazard[j]`: how often a draft at depth j + 1 is accepted where all before it were; for places left open."""
    sure, opened, nodes = found.sure.tolist(), found.open.tolist(), found.nodes.tolist()
    lowest, highest, exact = found.lowest.tolist(), found.highest.tolist(), found.exact.tolist()
    end = len(sure)
    fewest, most = [0] * (end + 1), [0] * (end + 1)
    for place in reversed(range(end)):
        reach = range(place + lowest[place], place + highest[place] + 1)
        fewest[place] = 1 + min(fewest[min(to, end)] for to in reach)
        most[place] = 1 + max(most[min(to, end)] for to in reach)
    out = Walk(emitted=end, fewest=fewest[0], most=most[0])
    visits = [1.0] + [0.0] * end
    for place in range(end):
        if not visits[place]:
            continue
        out.steps += visits[place]
        out.unknown += visits[place] * (not exact[place])
        out.sizes[nodes[place]] += visits[place]  # type: ignore[assignment]
        for length, chance in _chances(sure[place], opened[place], hazard):
            to = min(place + length, end)
            visits[to] += visits[place] * chance
            out.histogram[to - place] += visits[place] * chance  # type: ignore[assignment]
    return out


def _chances(sure: int, opened: bool, hazard: Sequence[float]) -> list[tuple[int, float]]:
    if not opened:
        return [(sure, 1.0)]
    found, left = [], 1.0
    for length in range(sure, len(hazard) + 1):
        found.append((length, left * (1 - hazard[length - 1])))
        left *= hazard[length - 1]
    return [*found, (len(hazard) + 1, left)]


def hazards(found: Sequence[tuple[Lengths, Tensor]], depth: int, prior: Sequence[float] | None = None) -> list[float]:
    """Acceptance by depth where all before was accepted, over places that are known or closed; `prior` counts as 4 tries."""
    tried, taken = [0] * depth, [0] * depth
    for one, use in found:
        for sure in one.sure[use & ~one.open].tolist():
            for j in range(min(sure, depth)):
                tried[j] += 1
                taken[j] += sure > j + 1
    weight = 0 if prior is None else 4
    return [
        (taken[j] + weight * (prior[j] if prior else 0)) / (tried[j] + weight) if tried[j] + weight else 0.0
        for j in range(depth)
    ]
