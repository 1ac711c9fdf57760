"""The shipped float32 kernels under fixed uniforms that fill their cube evenly: the law of a rule as it runs.

The enumeration proves the rule in float64 and replaces its chance. Here draws, coins and last draws compare real uniforms, as
in a run, through the kernels in use (torch, or Triton with its own walk): the points of a scrambled Sobol net, of which each
coordinate has one in every 1/n-th. Frequencies over the net come near the law like 1/n rather than 1/sqrt(n), but for the
corners of the regions that several thresholds cut out; RESOLUTION leaves room for those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from specresearch.fit import name_of
from specresearch.kernels.backend import on_triton
from specresearch.kernels.sampling import pick
from specresearch.lossless.enumeration import Outcomes, Table, complete, emitted, step, total_variations
from specresearch.lossless.exact import instances
from specresearch.types import TreePolicy, Verifier

POINTS = 1 << 13
RESOLUTION = 0.02


@dataclass(frozen=True)
class GridCertificate:
    """`worst`: the largest TV between the law on the net and the target's, over the instances."""

    rule: str
    law: str
    growth: str
    shape: str
    kernels: Literal["torch", "triton"]
    instances: int
    points: int
    worst: float
    resolution: float
    lossy: str | None

    @property
    def verdict(self) -> str:
        """agrees | lossy | biased"""
        return "agrees" if self.worst <= self.resolution else "lossy" if self.lossy else "biased"


class Net:
    """An `Rng` of given uniforms `points` [R, D]: coins by their number, draft draws and picks in the order of the calls."""

    def __init__(self, points: Tensor, coins: int):
        self.points, self.coins, self.next = points, coins, coins

    def _column(self) -> Tensor:
        self.next += 1
        return self.points[:, self.next - 1]

    def accept(self, coin_id: Tensor | int, threshold: Tensor) -> Tensor:
        index = torch.as_tensor(coin_id, device=self.points.device).expand(len(self.points))
        return self.points.gather(1, index[:, None])[:, 0] < threshold

    def pick(self, weights: Tensor) -> Tensor:
        return pick(weights, self._column())

    def draw(self, weights: Tensor, slot: int) -> Tensor:
        return pick(weights, torch.stack([self._column() for _ in range(weights.shape[1])], 1))

    def uniforms(self, nodes: int) -> tuple[Tensor, Tensor]:
        return self.points[:, :nodes], self._column()


def grid(
    verifier: Verifier,
    policy: TreePolicy,
    shape: str,
    points: int = POINTS,
    vocab: int = 3,
    seed: int = 0,
    device: str = "cpu",
) -> GridCertificate:
    """Run one step of the float32 code at every point of the net, for each of a few laws, and compare. Coins must be
    numbered below the tree's size, as nodes are."""
    p, q = (_few(table) for table in instances(policy.depth + 1, vocab, 1, torch.Generator().manual_seed(seed)))
    p = p.one_hot() if verifier.greedy_only else p
    laws = complete(p, iter([_outcomes(verifier, policy, p, q, points, seed, device)]))
    worst = float(total_variations(laws, p).max())
    kernels: Literal["torch", "triton"] = "triton" if on_triton(torch.zeros((), device=device)) else "torch"
    return GridCertificate(
        *(name_of(verifier), policy.law, policy.growth, shape, kernels, len(p), points, worst, RESOLUTION),
        verifier.lossy,
    )


def _few(table: Table) -> Table:
    """The first, one with p = q and one with zeros (`instances` puts these at the end), in float32's numbers."""
    return Table(table.laws[[0, 1, 2, -7, -3, -1]].float().double(), table.horizon)


def _outcomes(
    verifier: Verifier, policy: TreePolicy, p: Table, q: Table, points: int, seed: int, device: str
) -> Outcomes:
    """Every point with every instance."""
    size, levels = policy.size, policy.depth + 1
    draws = policy.asked * policy.width
    net = SobolEngine(size + draws + levels + 1, scramble=True, seed=seed).draw(points, dtype=torch.float64)
    instance = torch.arange(len(p), device=device).repeat_interleave(points)
    rng = Net(net.repeat(len(p), 1).to(device), size)
    one, other = (Table(table.laws.float().to(device), table.horizon) for table in (p, q))
    tree, verdict = step(policy, verifier, one, other, instance, rng)
    weight = torch.full((len(instance),), 1 / points, dtype=torch.float64)
    found = emitted(tree, verdict, instance, weight, policy.depth + 1)
    return Outcomes(instance.cpu(), found.block.cpu(), found.length.cpu(), weight, found.sound.cpu())
