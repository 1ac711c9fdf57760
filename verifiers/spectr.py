"""SpecTr's K-SEQ: k iid children, each accepted with probability min(1, p(x) / (rho q(x))), with the best rho.

Sun et al. 2023 (arXiv:2310.15141), algorithm 2. With beta = sum min(q, p / rho), a node is accepted with probability
1 - (1 - beta)^k, and rho is the least number for which that is at most rho beta. The residual depends on k, so the number of
children must be fixed before any of them is seen: static trees only.
"""

from __future__ import annotations

from specresearch.kernels.spectr import kseq
from specresearch.types import Probs, Rng, Tree, Verdict, Verifier


class SpecTr(Verifier):
    laws = frozenset({"iid"})
    growths = frozenset({"static"})

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        return kseq(tree, p, rng)
