"""Accept a child if it is the target's argmax: exact at temperature 0, and refused above it."""

from __future__ import annotations

from torch import Tensor

from specresearch.types import Probs, Rng, Tree, Verdict, Verifier
from specresearch.walk import walk


class Greedy(Verifier):
    greedy_only = True

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        return walk(tree, p, ArgmaxRule(), rng)


class ArgmaxRule:
    residual: Tensor

    def enter(self, p: Tensor, node: Tensor) -> None:
        self.residual = p

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        # p is one-hot at the argmax; a row of NaN, which has an argmax too, accepts nothing and fails at the pick.
        return trying & (self.residual.gather(1, token[:, None])[:, 0] == 1)
