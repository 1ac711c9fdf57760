"""Lossless rejection sampling. The tree's law, and not the user, decides which rule applies.

- chain, or children drawn iid from q: accept x if u < p(x)/q(x), else p <- norm (p - q)+ and go on with the next child
  (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; SpecInfer, Miao et al. 2023, arXiv:2305.09781, algorithm 2);
- children drawn without replacement: the same, and q <- norm (q without x) (Sequoia, arXiv:2402.12374, algorithm 2);
- children that are a function of the past (top-k, n-grams, re-ranked trees): each is a point mass, so accept x if
  u < p(x), else p <- norm (p without x) (EAGLE-2, arXiv:2406.16858).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specresearch.types import Probs, Rng, Tree, Verdict, Verifier
from specresearch.walk import Rule, walk


class Rejection(Verifier):
    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        rule: Rule = PointRule() if tree.law == "point" or tree.q is None else DrawnRule(tree)
        return walk(tree, p, rule, rng)


class PointRule:
    """Fresh coin per child. A tried token has no mass left, so a duplicate sibling can never be accepted."""

    residual: Tensor

    def enter(self, p: Tensor, node: Tensor) -> None:
        self.residual = p

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        token = token[:, None]
        mass = self.residual.gather(1, token)[:, 0]
        ok = rng.accept(child, torch.where(trying, mass / self.residual.sum(1), 0.0))
        out = (trying & ~ok)[:, None]
        self.residual = self.residual.scatter(1, token, torch.where(out, 0.0, mass[:, None]))
        return ok


class DrawnRule:
    def __init__(self, tree: Tree):
        assert tree.q is not None
        self.law_of_children = tree.q
        self.without_replacement = tree.law == "without_replacement"

    residual: Tensor

    def enter(self, p: Tensor, node: Tensor) -> None:
        self.residual = p
        self.q = self.law_of_children[torch.arange(node.shape[0], device=node.device), node]

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        token = token[:, None]
        q = self.q.gather(1, token)[:, 0]
        possible = trying & (q > 0)  # a child that q cannot draw is dead: p/0 must not accept it
        ok = rng.accept(child, torch.where(possible, self.residual.gather(1, token)[:, 0] / q, 0.0))
        out = (possible & ~ok)[:, None]
        rest = (self.residual - self.q).clamp(min=0)
        mass = rest.sum(1, keepdim=True)
        # p = q leaves no residual; rounding alone can reject there, and then p itself is right to within rounding.
        self.residual = torch.where(out & (mass > 0), rest / mass, self.residual)
        if self.without_replacement:
            left = self.q.scatter(1, token, 0.0)
            mass = left.sum(1, keepdim=True)
            self.q = torch.where(out, torch.where(mass > 0, left / mass, 0.0), self.q)
        return ok
