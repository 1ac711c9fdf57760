"""Certificates of acceptance rules: the completed law of every outcome against the target's, on laws of every kind.

For laws in general position each entry of the difference is a rational function of p and q on each cell of their
comparisons, so that it is zero everywhere in a cell, or almost nowhere: random instances from each cell settle it. The cells
counted here are the orders of p/q over the tokens, with the place of 1 among them, at the root: 12 for three tokens. p = q and
laws with zeros lie between the cells and are tried as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specresearch.fit import check_fit, name_of
from specresearch.lossless.enumeration import Table, complete, outcomes, total_variations
from specresearch.trees.best_first import BestFirstTree
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.static import Chain, StaticTree
from specresearch.types import Drafter, TreePolicy, UserError, Verifier

EXACT = 1e-12  # of total variation: what float64 adds up to on tens of thousands of outcomes is near 1e-15
EIGHTHS = 8


@dataclass(frozen=True)
class Certificate:
    """What was found of one rule on one shape. `worst` is the largest TV between the completed law and the target's."""

    rule: str
    law: str
    growth: str
    shape: str
    instances: int
    outcomes: int
    cells: int  # seen, of `all_cells`
    all_cells: int
    worst: float
    lossy: str | None
    counter_example: str | None

    @property
    def verdict(self) -> str:
        """exact | lossy | biased"""
        return "exact" if self.worst <= EXACT else "lossy" if self.lossy else "biased"


def certify(
    verifier: Verifier, policy: TreePolicy, shape: str, vocab: int = 3, least: int = 40, seed: int = 0
) -> Certificate:
    """Enumerate the rule on `policy`'s trees, on at least `least` random instances and in every cell. A rule that is right at
    temperature 0 only is shown one-hot targets."""
    p, q = instances(policy.depth + 1, vocab, least, torch.Generator().manual_seed(seed))
    seen = cell_of(p.of_root(), q.of_root())
    cells = seen[seen >= 0].unique().numel()
    worst, count = _worst(verifier, policy, p, q)
    example = None if worst <= EXACT else counter_example(verifier, policy, p, q)
    return Certificate(
        *(name_of(verifier), policy.law, policy.growth, shape, len(p), count, cells, cells_of(vocab), worst),
        *(verifier.lossy, example),
    )


def certificates(verifier: Verifier, vocab: int = 3, least: int = 40, seed: int = 0) -> Iterator[Certificate]:
    """One for every shape that the verifier declares itself lossless for."""
    for shape, policy in shapes_for(verifier).items():
        yield certify(verifier, policy, shape, vocab, least, seed)


def shapes_for(verifier: Verifier) -> dict[str, TreePolicy]:
    """Small trees of every law and growth that the verifier may be combined with, by name."""
    return {name: policy for name, policy in shapes().items() if _fits(verifier, policy)}


def shapes() -> dict[str, TreePolicy]:
    found: dict[str, TreePolicy] = {}
    for draw in ("topk", "iid", "without_replacement"):
        how: Any = {"temperature": 1.0, "draw": draw}
        found[f"chain {draw}"] = Chain(depth=2, **how)
        found[f"best-first chain {draw}"] = BestFirstTree(size=3, depth=2, topk=1, **how)
        found[f"wide {draw}"] = StaticTree(widths=[3], **how)
        found[f"2x2 {draw}"] = StaticTree(widths=[2, 2], **how)
        found[f"best-first {draw}"] = BestFirstTree(size=4, depth=2, topk=2, **how)
        found[f"dynamic {draw}"] = DynamicTree(size=4, depth=2, topk=2, **how)
    return found


def _fits(verifier: Verifier, policy: TreePolicy) -> bool:
    try:
        check_fit(Drafter(), policy, verifier, 0.0 if verifier.greedy_only else 1.0, "allow")
    except UserError:
        return False
    return True


def _worst(verifier: Verifier, policy: TreePolicy, p: Table, q: Table) -> tuple[float, int]:
    p = p.one_hot() if verifier.greedy_only else p
    parts = list(outcomes(policy, verifier, p, q))
    worst = float(total_variations(complete(p, iter(parts)), p).max())
    return worst, sum(len(part.weight) for part in parts)


# -- instances ---------------------------------------------------------------------------------------------------------


def cells_of(vocab: int) -> int:
    """Orders of p/q, times the places of 1 between the least and the largest."""
    return math.factorial(vocab) * (vocab - 1)


def cell_of(p: Tensor, q: Tensor) -> Tensor:
    """Number of the cell of laws [..., V] in general position -> [...], -1 for others."""
    ratio = p / q
    vocab = ratio.shape[-1]
    order = ratio.argsort(-1)
    place = vocab ** torch.arange(vocab)
    tied = (ratio.sort(-1).values.diff(dim=-1) <= 0).any(-1) | ~ratio.isfinite().all(-1) | (ratio <= 0).any(-1)
    return torch.where(tied, -1, (order * place).sum(-1) * vocab + (ratio > 1).sum(-1))


def instances(horizon: int, vocab: int, least: int, generator: torch.Generator) -> tuple[Table, Table]:
    """Pairs of tables p, q: `least` or more in turn from each cell, then p = q, then laws with zeros."""
    ps: list[Table] = []
    qs: list[Table] = []
    seen: dict[int, int] = {}

    def add(zeros: float = 0.0, same: bool = False) -> int:
        p = Table.random(vocab, horizon, generator, zeros)
        q = p if same else Table.random(vocab, horizon, generator, zeros)
        ps.append(p)
        qs.append(q)
        return int(cell_of(p.of_root(), q.of_root()))

    for _ in range(200 * cells_of(vocab)):  # a cell is hit once in 30 draws; ones that were seen more often are let go
        cell = add()
        seen[cell] = seen.get(cell, 0) + 1
        rare = min(seen.values()) if len(seen) == cells_of(vocab) else 0
        if seen[cell] > rare + 3:
            seen[cell] -= 1
            ps, qs = ps[:-1], qs[:-1]
        if len(ps) >= least and len(seen) == cells_of(vocab):
            break
    for zeros, same in ((0.0, True), (0.0, True), (0.3, True), (0.3, False), (0.3, False), (0.3, False), (0.6, False)):
        add(zeros, same)
    return Table.stack(ps), Table.stack(qs)


# -- counter-examples --------------------------------------------------------------------------------------------------


def counter_example(verifier: Verifier, policy: TreePolicy, p: Table, q: Table) -> str:
    """The shortest place at which the law is wrong, in eighths if there is one."""
    generator = torch.Generator().manual_seed(0)
    small = [Table.stack([_eighths(p, generator) for _ in range(40)]) for _ in range(2)]
    for one, other in (small, (p, q)):
        one = one.one_hot() if verifier.greedy_only else one
        laws = complete(one, outcomes(policy, verifier, one, other))
        distance = total_variations(laws, one)
        if float(distance.max()) > EXACT:
            worst = int(distance.argmax())
            return _say(laws[worst], one[worst], other[worst], float(distance[worst]))
    raise AssertionError("there is nothing to show: the law is right")


def _eighths(like: Table, generator: torch.Generator) -> Table:
    balls = torch.randint(like.vocab, (*like.laws.shape[1:-1], EIGHTHS), generator=generator)
    return Table((torch.nn.functional.one_hot(balls, like.vocab).sum(-2).double() / EIGHTHS)[None], like.horizon)


def _say(law: Tensor, p: Table, q: Table, distance: float) -> str:
    found = law.view([p.vocab] * p.horizon)
    for depth in range(p.horizon):
        for number in range(p.vocab**depth):
            prefix = tuple(number // p.vocab ** (depth - 1 - k) % p.vocab for k in range(depth))
            mass = found[prefix].reshape(p.vocab, -1).sum(1)
            reached = float(p.law()[0].view_as(found)[prefix].sum())
            if float((mass - reached * p.of(prefix)).abs().sum()) > EXACT:
                after = f" after {' '.join(map(str, prefix))}" if prefix else ""
                given = f"p = {_numbers(p.of(prefix))}, q = {_numbers(q.of(prefix))}"
                got = f"got {_numbers(mass / max(reached, 1e-300))}, wanted {_numbers(p.of(prefix))}"
                return f"{given}{after}: {got} (TV {distance:.3g} in all)"
    raise AssertionError("the law is right")


def _numbers(law: Tensor) -> str:
    whole = law * EIGHTHS
    if bool(((whole - whole.round()).abs() < 1e-9).all()):
        return " ".join(f"{int(x)}/{EIGHTHS}" if 0 < x < EIGHTHS else str(int(x > 0)) for x in whole.round().tolist())
    return " ".join(f"{x:.3f}" for x in law.tolist())
