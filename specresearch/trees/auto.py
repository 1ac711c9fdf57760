"""Dynamic trees whose shape is chosen in every step by what it brings per second, down to no tree at all."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.optimal import interpolate, is_positive, measured_cost
from specresearch.types import Ask, Step, Tree, UserError, Verdict

FADING = 0.99  # what a step's evidence weighs one step later
BELIEF = 1.0  # weight of the belief that drafts are as good as their drafter says: a bad one is tried again some day
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class AutoTree(DynamicTree):
    """A node stays if the tokens that it should bring outweigh, at the going rate of tokens per time, what it adds to the
    target's pass; a level is asked about on the same terms. What nodes should bring is what the drafter's probabilities
    say, corrected by what came of them at that depth so far. So a confident drafter gets deep trees, and one that is
    always wrong is asked once in a few dozen steps, while the rest is plain decoding.

    All rows give evidence together: above temperature 0 the tokens drawn depend on what else was decoded, and on the costs
    unless both are given, though their law does not. Reads from the device what a choice waits for: a number a level and the
    worth of the candidates; and what came of the step, once.
    """

    def __init__(
        self,
        *,
        depth: int,
        topk: int,
        size: int,
        temperature: float,
        cost: Mapping[int, float] | None = None,
        draft_cost: float | None = None,
        draw: str | None = None,
    ):
        if cost is not None and not (
            isinstance(cost, Mapping) and 1 in cost and all(map(is_positive, [*cost, *cost.values()]))
        ):
            raise UserError(f"tree.cost={cost}: use sizes, 1 among them, and positive times, e.g. {{1:1,8:1.2,16:1.5}}")
        if draft_cost is not None and not is_positive(draft_cost) and draft_cost != 0:
            raise UserError(f"tree.draft_cost={draft_cost}: use 0 or a positive number")
        super().__init__(depth=depth, topk=topk, size=size, temperature=temperature, draw=draw)
        self.cost = {n: t / cost[1] for n, t in cost.items()} if cost else {1: 1.0}
        self.passes: dict[int, float] = {}  # `_pass`, as far as it was asked for
        self.measures, self.draft_cost = cost is None, draft_cost
        self.unit = 0.0  # seconds of a pass over one node; 0: not measured
        # The first ones are slow, since kernels are made ready: until there are three more, levels are taken for free.
        self.level_seconds: deque[float] = deque([0.0] * 3, maxlen=31)
        self.evidence, self.plan = _Evidence(depth), NOTHING
        self.rows = 1  # live ones of the step under way
        self.began: float | None = None  # its last level

    def prepare(self, seconds: Callable[[int], float]) -> None:
        if self.measures:
            self.cost, self.passes = measured_cost(seconds, self.size), {}
        if self.draft_cost is None:
            self.unit = seconds(1)

    def grow(self, step: Step, ask: Ask) -> Tree:
        self.asked_levels, self.began = 0, None
        tree = super().grow(step, ask)
        if not self.asked_levels:
            self.plan = NOTHING
            return tree
        worth = torch.where(tree.valid & step.live[:, None], tree.score.double().exp(), 0.0)
        promised = worth.new_zeros(self.depth + 1).index_add(0, tree.depth.flatten(), worth.flatten())
        self.plan = _Plan(self.asked_levels, tree.tokens.shape[1], promised)
        return tree

    def goes_on(self, step: Step, depth: int, total: Tensor) -> bool:
        reach = step.live if depth == 0 else torch.where(step.live, total.exp().sum(1).clamp(max=1), 0.0)
        reached = sum(reach.tolist())
        if self.began is not None:  # the number above waited for the level
            self.level_seconds.append(time.perf_counter() - self.began)
        else:
            self.rows = round(reached)  # every live row has reached the root
        self.began, self.asked_levels = time.perf_counter(), depth
        if depth == self.depth:
            return False
        gain = reached * self.evidence.trust(depth) * self.evidence.chance(depth + 1)
        return gain > self._rate() * (self._level() + self._pass(2 * self.rows) - self._pass(self.rows))

    def keeps(self, step: Step, total: Tensor, depth: Tensor) -> int:
        trust = torch.tensor([self.evidence.trust(d) for d in range(self.depth + 1)], device=total.device)
        worth = torch.where(step.live[:, None], total.exp() * trust[depth], 0.0)[:, 1:]
        gain = [0.0, *worth.sort(1, descending=True).values.sum(0).cumsum(0).tolist()]
        most, rate = min(self.size, len(gain)), self._rate()
        sizes = [n for n in SIZES if n < most] + [most]
        return max(sizes, key=lambda n: gain[n - 1] - rate * self._pass(self.rows * n))

    def observe(self, verdict: Verdict, seconds: float) -> None:
        plan, self.plan = self.plan, NOTHING
        count = verdict.length.shape[0]
        read = (verdict.length if plan.promised is None else torch.cat([verdict.length, plan.promised])).tolist()
        lengths, promised = [round(n) for n in read[:count] if n], read[count:]
        spent = self._pass(len(lengths) * plan.size) + (plan.levels * self._level() if plan.levels else 0.0)
        self.evidence.add(lengths, plan.levels, promised, spent)

    def _rate(self) -> float:
        """The going rate, tokens per time: never less than that of plain decoding."""
        return max(self.rows / self._pass(self.rows), self.evidence.rate())

    def _pass(self, nodes: int) -> float:
        """Time of a pass over so many nodes, in passes over one; beyond what was measured it goes on straight."""
        if nodes not in self.passes:
            a, b = sorted(self.cost)[-2:] if len(self.cost) > 1 else (0, 1)
            slope = (self.cost[b] - self.cost.get(a, self.cost[b])) / (b - a)
            self.passes[nodes] = interpolate(self.cost, nodes) + slope * max(nodes - b, 0)
        return self.passes[nodes]

    def _level(self) -> float:
        """Time of one level of drafting, in passes over one node."""
        if self.draft_cost is not None:
            return self.draft_cost
        return statistics.median(self.level_seconds) / self.unit if self.unit else 0.0


@dataclass(frozen=True)
class _Plan:
    """What a step set out to do."""

    levels: int  # asked about
    size: int  # nodes verified
    promised: Tensor | None  # the drafter's probability of the nodes at each depth [D + 1], all rows together


NOTHING = _Plan(0, 1, None)


class _Evidence:
    """What came of the steps so far, by depth: sums that fade."""

    def __init__(self, depth: int):
        self.sums = [[0.0] * (depth + 1) for _ in range(4)]  # promised, accepted of it; asked, accepted
        self.tokens = self.time = 0.0

    def add(self, lengths: Sequence[int], levels: int, promised: Sequence[float], spent: float) -> None:
        self.tokens, self.time = FADING * self.tokens + sum(lengths), FADING * self.time + spent
        self.sums = [[FADING * x for x in row] for row in self.sums]
        for depth in range(1, levels + 1):
            asked, taken = (sum(n >= least for n in lengths) for least in (depth, depth + 1))
            kept = promised[depth] > 0
            for row, more in zip(self.sums, (promised[depth], taken * kept, asked, taken)):
                row[depth] += more

    def trust(self, depth: int) -> float:
        """How much of the probability promised at this depth is accepted; 1 for the root."""
        return self._share(0, depth)

    def chance(self, depth: int) -> float:
        """That a draft at this depth is accepted, where those above it are."""
        return self._share(2, depth)

    def _share(self, sums: int, depth: int) -> float:
        """Without evidence of its own, a depth is as good as the one above it."""
        share = 1.0
        for hoped, come in zip(self.sums[sums][1 : depth + 1], self.sums[sums + 1][1 : depth + 1]):
            share = (come + BELIEF * share) / (hoped + BELIEF)
        return share

    def rate(self) -> float:
        return self.tokens / self.time if self.time else 0.0
