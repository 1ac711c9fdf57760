"""Bets against the hypothesis that a law holds: wealth that, if it holds, is unlikely ever to be large.

A bet multiplies its wealth by 1 + lambda c at every observation, c a bounded martingale difference. The mean of all bets is
a non-negative martingale that starts at 1, so P(it ever reaches 1/alpha) <= alpha (Ville's inequality): one may look
after every token and stop. The tolerant form 1 + lambda (c - tolerance * range) is a supermartingale for every law
within that total variation of the claimed one at every step.

Legend: n observations, S scores, M bets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

LAMBDAS = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)  # each for both signs; scores range over at most 2
MOST = 1 << 50
STAKES = (1.0, 10.0, 1e6)  # on what cannot happen at all; those that a tolerance would ruin at once are lowered


def bets(scores: int) -> int:
    return scores * 2 * len(LAMBDAS) + len(STAKES)


def growth(excess: Tensor, range: Tensor, impossible: Tensor, tolerance: float = 0.0) -> Tensor:
    """Log factors [n, M] of all bets from excess, range [n, S] and impossible [n] bool."""
    lambdas = torch.tensor(LAMBDAS, dtype=torch.float64, device=excess.device)
    slack = tolerance * range
    gains = torch.stack([excess - slack, -excess - slack], -1)  # [n, S, 2]
    drawn = torch.log1p(gains[..., None] * lambdas).flatten(1)
    stakes = torch.tensor([min(s, 0.5 / tolerance) if tolerance else s for s in STAKES], dtype=torch.float64)
    hard = torch.log1p((impossible.double() - tolerance)[:, None] * stakes.to(excess.device))
    return torch.cat([drawn, hard], 1)


def wealth(logs: Tensor) -> Tensor:
    """Log of the mean of all bets, [..., M] -> [...]"""
    return logs.logsumexp(-1) - math.log(logs.shape[-1])


def resolution(variance: float, tokens: float, scores: int, alpha: float, power: float) -> float:
    """The smallest bias of one score, per token, that makes the wealth reach 1/alpha within `tokens` with this probability.

    A bet's log wealth is about normal with mean n (lambda d - lambda^2 v / 2) and deviation lambda sqrt(n v); alone it must
    reach M / alpha, so d = min over lambda of log(M / alpha) / (lambda n) + lambda v / 2 + z sqrt(v / n).
    """
    if tokens <= 0:
        return math.inf
    need, z = math.log(bets(scores) / alpha), NormalDist().inv_cdf(power)
    least = min(need / (x * tokens) + x * variance / 2 for x in LAMBDAS)
    return least + z * math.sqrt(variance / tokens)


def first(enough: Callable[[int], bool]) -> int:
    """The smallest positive number for which a monotone condition holds, up to MOST."""
    high = 1
    while not enough(high) and high < MOST:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class Evidence:
    """Scores that come in over time: the wealth of all bets on them, its largest value, and the sums for a z at the end."""

    def __init__(self, scores: int):
        self.logs = torch.zeros(bets(scores), dtype=torch.float64)
        self.sums = torch.zeros(2, scores, dtype=torch.float64)  # of excess, variance
        self.count = self.impossible = 0
        self.best = 0.0

    def add(self, excess: Tensor, variance: Tensor, impossible: Tensor) -> None:
        """excess, variance [n, S] and impossible [n], in the order in which they came; all on the CPU."""
        if not len(excess):
            return
        path = self.logs + growth(excess, torch.zeros_like(excess), impossible).cumsum(0)
        self.best = max(self.best, float(wealth(path).max()))
        self.logs = path[-1]
        self.sums = self.sums + torch.stack([excess.sum(0), variance.sum(0)])
        self.count += len(excess)
        self.impossible += int(impossible.sum())

    def state(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        counts = {"count": self.count, "impossible": self.impossible, "best": self.best}
        return {"logs": self.logs.tolist(), "sums": self.sums.tolist(), **counts}

    def load(self, state: dict[str, Any]) -> None:
        self.logs, self.sums = (torch.tensor(state[key], dtype=torch.float64) for key in ("logs", "sums"))
        self.count, self.impossible, self.best = state["count"], state["impossible"], state["best"]

    def z(self) -> float | None:
        """Of the score that stands out most; None where none of them could vary."""
        excess, variance = self.sums
        each = excess / variance.sqrt()
        return max((float(z) for z in each[variance > 0]), key=abs, default=None)
