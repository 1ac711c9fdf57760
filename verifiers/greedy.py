"""Accept a child if it is the target's argmax: exact at temperature 0, and refused above it."""

from __future__ import annotations

from specresearch.kernels import verify
from specresearch.types import Probs, Rng, Tree, Verdict, Verifier


class Greedy(Verifier):
    greedy_only = True
    replay = "given_tree"

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        return verify.greedy(tree, p, rng)
