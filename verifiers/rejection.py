"""Lossless rejection sampling, by the rule that belongs to the way in which children were chosen: `tree.law` decides.

- chain, or children drawn iid from q: accept x if u < p(x)/q(x), else p <- norm (p - q)+ and go on with the next child
  (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; SpecInfer, Miao et al. 2023, arXiv:2305.09781, algorithm 2);
- children drawn without replacement: the same, and q <- norm (q without x) (Sequoia, arXiv:2402.12374, algorithm 2);
- children that are a function of the past (top-k, n-grams, re-ranked trees): each is a point mass, so accept x if
  u < p(x), else p <- norm (p without x) (EAGLE-2, arXiv:2406.16858).
"""

from __future__ import annotations

from specresearch.kernels import verify
from specresearch.types import Probs, Rng, Tree, Verdict, Verifier


class Rejection(Verifier):
    replay = "by_law"

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        return verify.rejection(tree, p, rng)
