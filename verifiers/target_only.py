"""SGLang's target-only tree sampling: one coin per parent, laid against the running sum of p over its children.

Lossless at thresholds of 1: the distinct children and the rest partition [0, 1). (A tried token has no mass left here, so
a repeated sibling is dead; counted twice, as elsewhere, it would bias the output.) `threshold_single` accepts any child
with p at or above it; `threshold_acc` divides the running sum. Below 1 both bias the output, and the law of a token shifts by
at most TV 1 - min(threshold_single, threshold_acc). For S = the mass of the children before the first, of mass m, whose
acceptance is sure (m >= single or S + m >= acc; S < acc): what some tokens gain and others lose is the larger of
S / acc - S < 1 - acc and 1 - S - m. A single child of mass m = acc or m = single reaches the bound.
At thresholds of 1 a node is accepted with probability p(its children), as under the point-mass rule.
"""

from __future__ import annotations

from specresearch.kernels import verify
from specresearch.types import Probs, Rng, Tree, UserError, Verdict, Verifier


class TargetOnly(Verifier):
    replay = "given_tree"  # at thresholds of 1; below, the white box is to see the bias

    def __init__(self, *, threshold_single: float = 1.0, threshold_acc: float = 1.0):
        for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
            if not 0 < value <= 1:
                raise UserError(f"verifier.{name}={value}: use a number above 0 and up to 1 (1 = lossless)")
        self.single, self.acc = threshold_single, threshold_acc
        if threshold_single < 1 or threshold_acc < 1:
            self.tv_bound = 1 - min(threshold_single, threshold_acc)
            self.lossy = f"thresholds below 1 shift the law of a token by up to TV {self.tv_bound:.3g}"

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        return verify.target_only(tree, p, rng, self.single, self.acc)
