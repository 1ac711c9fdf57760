"""How sure a ratio of sums is: the bootstrap over questions, paired comparisons, Holm's correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]

FEWEST = 5  # units; with fewer there is no interval worth the name
ROUNDING = 1e-9  # two runs that measured the same differ by no more in the logarithm of their ratio


@dataclass(frozen=True)
class Quotient:
    """A product of sums over U units, divided by another: tokens / steps, and the ratio of two such numbers, too."""

    above: Array  # [A, U]
    below: Array  # [C, U]

    @property
    def units(self) -> int:
        return self.above.shape[1]

    def __truediv__(self, other: Quotient) -> Quotient:
        """The ratio of two quotients over the same units."""
        return Quotient(np.vstack([self.above, other.below]), np.vstack([self.below, other.above]))

    def logarithm(self, weights: Array) -> Array:
        """Its logarithm with each unit counted `weights` [R, U] times -> [R]; not finite where a sum is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(weights @ self.above.T).sum(1) - np.log(weights @ self.below.T).sum(1)


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums, its confidence interval, and how unlikely it would be if the truth were 1. None = not known."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None  # two-sided


UNKNOWN = Estimate()


class Bootstrap:
    """Intervals from `count` resamplings, the same draws for all that is asked about as many units.

    The logarithm of a ratio is taken to lie around its truth as Student's t does, with the standard deviation of the
    resampled logarithms. (Percentiles of the resamplings are too near where units are few: of 7 questions, 95% intervals
    hold the truth 85 times in 100; and shares of resamplings cannot be small enough to survive Holm's correction.)
    """

    def __init__(self, count: int, confidence: float, seed: int):
        self.count, self.confidence, self.seed = count, confidence, seed
        self.draws: dict[int, Array] = {}

    def weights(self, units: int) -> Array:
        """How often each unit is drawn -> [count, units]"""
        if units not in self.draws:
            rng = np.random.default_rng(self.seed)
            self.draws[units] = rng.multinomial(units, [1 / units] * units, self.count).astype(np.float64)
        return self.draws[units]

    def estimate(self, quotient: Quotient) -> Estimate:
        if not quotient.units:
            return UNKNOWN
        center = float(quotient.logarithm(np.ones((1, quotient.units)))[0])
        if not isfinite(center):
            return UNKNOWN
        if quotient.units < FEWEST:
            return Estimate(exp(center))
        logs = quotient.logarithm(self.weights(quotient.units))
        error = float(logs[np.isfinite(logs)].std()) / shrinkage(quotient.units)
        half = float(stats.t.isf((1 - self.confidence) / 2, quotient.units - 1)) * error
        return Estimate(exp(center), exp(center - half), exp(center + half), p_value(center, error, quotient.units))


def shrinkage(units: int) -> float:
    """Standard deviation of a resampled mean, in that of a mean of new units."""
    return sqrt((units - 1) / units)


def p_value(center: float, error: float, units: int) -> float:
    """Two-sided, of a logarithm that is 0 in truth; `error` = its standard error."""
    if abs(center) < ROUNDING:
        return 1.0
    return float(2 * stats.t.sf(abs(center) / max(error, ROUNDING), units - 1))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number: all that stay below alpha hold together, but for a chance of alpha."""
    order = sorted((p, i) for i, p in enumerate(values) if p is not None)
    corrected: list[float | None] = [None] * len(values)
    most = 0.0
    for rank, (p, i) in enumerate(order):
        most = max(most, min(p * (len(order) - rank), 1.0))
        corrected[i] = most
    return corrected
