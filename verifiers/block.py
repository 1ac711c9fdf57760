"""Block verification of a chain: never fewer tokens than token-by-token rejection, and the same law.

Sun et al. 2024 (arXiv:2403.10444), algorithm 2. With w_i = min(1, w_{i-1} p(x_i) / q(x_i)), at least i drafts are kept with
probability w_i, so the expected number kept is sum_i sum_x min(q(x_1..x_i), w_{i-1} q(x_1..x_{i-1}) p(x_i)): each prefix may
make up for an earlier token that p likes less than q does. No rule for chains keeps more on average.
"""

from __future__ import annotations

from specresearch.kernels.block import block
from specresearch.types import Probs, Rng, Tree, Verdict, Verifier


class Block(Verifier):
    laws = frozenset({"iid", "without_replacement"})
    growths = frozenset({"static", "predictable"})
    chain_only = True

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        return block(tree, p, rng)
