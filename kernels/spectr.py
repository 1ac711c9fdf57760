"""SpecTr's K-SEQ: k children drawn iid from q, each accepted against the same discounted target.

Legend: B batch, V vocabulary. Sun et al. 2023 (arXiv:2310.15141), algorithm 2 and section 4; torch alone, on any device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specresearch.kernels.verify import plain, rows_that_move, walk
from specresearch.types import Probs, Rng, Tree, Verdict

HALVINGS = 52  # of the bracket of rho: its width is then within float64's rounding


def kseq(tree: Tree, p: Probs, rng: Rng) -> Verdict:
    return plain(tree, p, rng) if tree.q is None else walk(tree, KSeqRule(p, tree), rng)


def overlap(p: Tensor, q: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """-> min(q, p / rho) [B, V], and beta, its sum [B] in float64: the chance that one child is accepted"""
    each = torch.minimum(q, p / rho[:, None].to(p.dtype))
    return each, each.sum(1, dtype=torch.float64).clamp(max=1)


def any_accepted(beta: Tensor, count: Tensor) -> Tensor:
    """1 - (1 - beta)^k [B], without loss where beta is small"""
    return -torch.expm1(count * torch.log1p(-beta))


def solve_rho(p: Tensor, q: Tensor, count: Tensor) -> Tensor:
    """The least rho in [1, k] with 1 - (1 - beta)^k <= rho beta, from above: laws p, q [B, V], k = `count` [B] >= 1 -> [B].

    At that rho the residual just stays non-negative; above it the rule is right as well, though it accepts less.
    """
    low, high = torch.ones_like(count, dtype=torch.float64), count.double()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beta = overlap(p, q, middle)[1]
        fits = any_accepted(beta, count) <= middle * beta
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high


class KSeqRule:
    """Accept x if u < p(x) / (rho q(x)); if all k fail, draw from p - min(q, p / rho) (1 - (1 - beta)^k) / beta."""

    p: Tensor
    q: Tensor
    rho: Tensor
    residual: Tensor

    def __init__(self, rows: Callable[[Tensor], Tensor], tree: Tree):
        assert tree.q is not None
        self.rows, self.law_of_children = rows, tree.q
        child = tree.valid & (tree.parent >= 0)
        zero = torch.zeros_like(tree.parent)
        self.count = zero.scatter_add(1, tree.parent.clamp(min=0), child.long())  # [B, N] children of each node

    def enter(self, node: Tensor, moving: Tensor) -> None:
        p, at = self.rows(node), torch.arange(node.shape[0], device=node.device)
        q, count = self.law_of_children[at, node].to(p.dtype), self.count[at, node]
        rho = self.solve(p, q, count.clamp(min=1))
        self.p = rows_that_move(self, "p", moving, p)
        self.q = rows_that_move(self, "q", moving, q)
        self.rho = rows_that_move(self, "rho", moving, rho)
        self.residual = rows_that_move(self, "residual", moving, self._rest(p, q, rho, count))

    def solve(self, p: Tensor, q: Tensor, count: Tensor) -> Tensor:
        return solve_rho(p, q, count)

    def _rest(self, p: Tensor, q: Tensor, rho: Tensor, count: Tensor) -> Tensor:
        each, beta = overlap(p, q, rho)
        share = torch.where(beta > 0, any_accepted(beta, count.clamp(min=1)) / beta, 0.0)
        rest = (p - each * share[:, None].to(p.dtype)).clamp(min=0)
        # Without children p is left; so it is where p = q, and nothing but rounding can reject.
        return torch.where(((count > 0) & (rest.sum(1) > 0))[:, None], rest, p)

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        mass, q = (x.gather(1, token[:, None])[:, 0].double() for x in (self.p, self.q))
        return rng.accept(child, torch.where(trying & (q > 0), mass / (self.rho * q), 0.0))

    def finish(self, rng: Rng) -> Tensor:
        return rng.pick(self.residual)
