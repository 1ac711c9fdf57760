"""Traversal verification: block verification for trees whose children are drawn without replacement.

Weng et al. 2025 (arXiv:2505.12398), algorithm 2. The first leaf is accepted, with its whole branch, with the chance that its
path has of being kept; else it is deleted, what p still needs at its parent is worked out anew, and the next leaf is tried. On
a chain it is block verification. Needs trees that drop nothing after it was drawn.
"""

from __future__ import annotations

from specresearch.kernels.traversal import traversal
from specresearch.types import Probs, Rng, Tree, Verdict, Verifier


class Traversal(Verifier):
    laws = frozenset({"without_replacement"})
    growths = frozenset({"static", "predictable"})

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        return traversal(tree, p, rng)
