"""The black box: do emitted tokens follow the target's own law? It needs the tokens and, at each place, that law.

It sees neither drafts nor coins, so it judges any engine. The verdict comes from one pooled e-process with early stop; a
z of each score at the number of tokens reached, and how small a bias would have been seen, stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor

from specresearch.lossless import eprocess, scores
from specresearch.lossless.scores import NAMES, Scored, score
from specresearch.types import UserError

Id = int | str


@dataclass(frozen=True)
class Bias:
    """What one score exceeded its mean by, per token, and the interval that holds the true bias with probability 1 - alpha."""

    z: float | None
    bias: float
    low: float
    high: float


@dataclass(frozen=True)
class Report:
    verdict: Literal["consistent", "violation"]
    tokens: int
    log10_e: float
    log10_e_sup: float  # the verdict's: violation from log10(1 / alpha) on
    stopped_at: int | None  # token at which it was reached
    impossible: int  # tokens to which the target gives no probability
    p_value: float  # of the largest |z|, times the number of scores: valid if the number of tokens was fixed before
    resolution: float | None  # a shift of the mass of {q > p} that would have been seen with probability 0.9
    alpha: float
    tolerance: float
    scores: dict[str, Bias]
    suspects: list[Id]

    @property
    def says(self) -> str:
        """The verdict's ground, in a line."""
        if self.verdict == "violation":
            named = f"; questions that stand out: {', '.join(map(str, self.suspects[:5]))}" if self.suspects else ""
            never = f", {self.impossible} of probability 0 under these settings" if self.impossible else ""
            evidence = f"after {self.stopped_at:,} tokens the evidence is 10^{self.log10_e_sup:.1f} to 1"
            return f"{evidence} ({self.tokens:,} judged{never}){named}"
        if self.resolution is None or self.resolution >= 1:
            return f"{self.tokens:,} tokens, too few to see any bias"
        seen = f"would have seen a bias of TV {self.resolution:.2g} with probability 0.9"
        z = max((bias.z for bias in self.scores.values() if bias.z is not None), key=abs, default=0.0)
        return f"{self.tokens:,} tokens, log10 E {self.log10_e:.2f}, largest |z| {abs(z):.1f}; {seen}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class BlackBox:
    """Collects evidence against "every token follows p". At most `alpha` of right engines are ever called a violation.

    `tolerance`: total variation by which the engine's p may differ from ours at each place (its kernels, its dtype).
    """

    def __init__(self, alpha: float = 1e-3, tolerance: float = 0.0):
        if not _number(alpha) or not 0 < alpha < 1:
            raise UserError(f"alpha={alpha}: use a number between 0 and 1, e.g. 0.001")
        if not _number(tolerance) or not 0 <= tolerance < 0.2:
            raise UserError(f"tolerance={tolerance}: use a total variation from 0 to 0.2, e.g. 0.01 for bfloat16")
        self.alpha, self.tolerance = alpha, tolerance
        self.tokens = self.impossible = 0
        self.stopped_at: int | None = None
        self.sums = torch.zeros(3, len(NAMES), dtype=torch.float64)  # of excess, variance, range
        self.logs = torch.zeros(eprocess.bets(len(NAMES)), dtype=torch.float64)
        self.best = 0.0  # largest log wealth so far
        self.prompts: dict[Id, Tensor] = {}  # log wealth of each bet [M]
        self.curve: list[tuple[int, float]] = []  # (tokens, log10 E) after each update

    def update(self, p: Tensor, q: Tensor, tokens: Tensor, prompts: Sequence[Id]) -> None:
        """Laws of target and weak draft [n, V] at n places, the tokens [n] emitted there, the prompt of each."""
        self.add(score(p, q, tokens), prompts)

    def add(self, found: Scored, prompts: Sequence[Id]) -> None:
        """The same from scores that were made before."""
        if not len(found):
            return
        logs = eprocess.growth(found.excess, found.range, found.impossible, self.tolerance).cpu()
        path = eprocess.wealth(self.logs + logs.cumsum(0))
        over = (path >= -math.log(self.alpha)).nonzero()
        if self.stopped_at is None and len(over):
            self.stopped_at = self.tokens + int(over[0]) + 1
        self.best = max(self.best, float(path.max()))
        self.tokens += len(found)
        self.impossible += int(found.impossible.sum())
        self.sums += torch.stack([x.sum(0).cpu() for x in (found.excess, found.variance, found.range)])
        self.logs = self.logs + logs.sum(0)
        self.curve.append((self.tokens, float(path[-1]) / math.log(10)))
        order = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        own = torch.zeros(len(order), logs.shape[1], dtype=torch.float64)
        own.index_add_(0, torch.tensor([order[prompt] for prompt in prompts]), logs)
        for prompt, i in order.items():
            self.prompts[prompt] = self.prompts.get(prompt, 0) + own[i]

    @property
    def verdict(self) -> Literal["consistent", "violation"]:
        return "violation" if self.best >= -math.log(self.alpha) else "consistent"

    def report(self) -> Report:
        return Report(
            verdict=self.verdict,
            tokens=self.tokens,
            log10_e=float(eprocess.wealth(self.logs)) / math.log(10),
            log10_e_sup=self.best / math.log(10),
            stopped_at=self.stopped_at,
            impossible=self.impossible,
            p_value=self._p_value(),
            resolution=self._resolution(),
            alpha=self.alpha,
            tolerance=self.tolerance,
            scores={name: self._bias(i) for i, name in enumerate(NAMES)},
            suspects=self.suspects() if self.verdict == "violation" else [],
        )

    def suspects(self, level: float = 0.05) -> list[Id]:
        """Prompts whose own evidence is too much, worst first, by e-BH (Wang and Ramdas 2022, arXiv:2009.02824): of those
        named, an expected share of `level` at most is innocent, however the prompts depend on each other."""
        wealth = {prompt: float(eprocess.wealth(logs)) for prompt, logs in self.prompts.items()}
        ranked = sorted(wealth, key=lambda prompt: -wealth[prompt])
        bar = [math.log(len(ranked) / (k * level)) for k in range(1, len(ranked) + 1)]
        passed = [k for k, prompt in enumerate(ranked, 1) if wealth[prompt] >= bar[k - 1]]
        return ranked[: max(passed, default=0)]

    def _bias(self, i: int) -> Bias:
        total, variance, _ = self.sums[:, i].tolist()
        n = max(self.tokens, 1)
        half = NormalDist().inv_cdf(1 - self.alpha / 2) * math.sqrt(variance) / n
        z = total / math.sqrt(variance) if variance > 0 else None
        return Bias(z, total / n, total / n - half, total / n + half)

    def _p_value(self) -> float:
        """Two-sided, Bonferroni over the scores; what the tolerance explains is taken off first."""
        if self.impossible and not self.tolerance:
            return 0.0
        total, variance, ranges = self.sums
        z = (total.abs() - self.tolerance * ranges).clamp(min=0) / variance.sqrt()
        largest = float(z[variance > 0].max()) if bool((variance > 0).any()) else 0.0
        return min(1.0, len(NAMES) * math.erfc(largest / math.sqrt(2)))

    def _resolution(self) -> float | None:
        if not self.tokens:
            return None
        variance = float(self.sums[1, NAMES.index("above")]) / self.tokens
        seen = eprocess.resolution(variance, self.tokens, len(NAMES), self.alpha, 0.9)
        return min(1.0, seen + self.tolerance)

    def state(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return {
            **{"tokens": self.tokens, "impossible": self.impossible, "stopped_at": self.stopped_at, "best": self.best},
            **{"sums": self.sums.tolist(), "logs": self.logs.tolist(), "curve": [list(point) for point in self.curve]},
            "prompts": [[prompt, logs.tolist()] for prompt, logs in self.prompts.items()],
        }

    def load(self, state: dict[str, Any]) -> BlackBox:
        """Go on from a `state` of a box of the same alpha and tolerance."""
        self.tokens, self.impossible = state["tokens"], state["impossible"]
        self.stopped_at, self.best = state["stopped_at"], state["best"]
        self.sums, self.logs = (torch.tensor(state[key], dtype=torch.float64) for key in ("sums", "logs"))
        self.curve = [(int(tokens), float(e)) for tokens, e in state["curve"]]
        self.prompts = {prompt: torch.tensor(logs, dtype=torch.float64) for prompt, logs in state["prompts"]}
        return self

    def merge(self, other: BlackBox) -> None:
        """Take over what another box saw, as if it had come after. Its own largest wealth does not count, as it did not
        start with ours; so a violation may be seen later than by one box, and none is seen more often."""
        if (self.alpha, self.tolerance) != (other.alpha, other.tolerance):
            raise UserError("boxes of different alpha or tolerance cannot be merged")
        self.curve += [(self.tokens + other.tokens, float(eprocess.wealth(self.logs + other.logs)) / math.log(10))]
        self.tokens, self.impossible = self.tokens + other.tokens, self.impossible + other.impossible
        self.sums, self.logs = self.sums + other.sums, self.logs + other.logs
        self.best = max(self.best, float(eprocess.wealth(self.logs)))
        if self.stopped_at is None and self.verdict == "violation":
            self.stopped_at = self.tokens
        for prompt, logs in other.prompts.items():
            self.prompts[prompt] = self.prompts.get(prompt, 0) + logs


def plan(tv: float, alpha: float = 1e-3, power: float = 0.9, witness: float = 0.2) -> int:
    """Tokens after which a bias of total variation `tv` is seen with probability `power`.

    `witness` = p(A) of the set whose probability the fault raises, on average; 0.2 where the drafts are fair. The number
    grows as 1 / tv^2. Raises UserError for numbers that are no probabilities.
    """
    for name, value in (("tv", tv), ("alpha", alpha), ("power", power), ("witness", witness)):
        if not _number(value) or not 0 < value < 1:
            raise UserError(f"plan.{name}={value}: use a number between 0 and 1")
    variance = witness * (1 - witness)
    tokens = eprocess.first(lambda n: eprocess.resolution(variance, n, len(scores.NAMES), alpha, power) <= tv)
    if tokens >= eprocess.MOST:
        raise UserError(
            f"plan.tv={tv}: no number of tokens that anyone could emit shows so small a bias, use a larger one"
        )
    return tokens


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
