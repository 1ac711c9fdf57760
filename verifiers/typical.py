"""Typical acceptance (Cai et al. 2024, arXiv:2401.10774): keep what the target finds plausible. LOSSY above temperature 0.

A child x is accepted if p(x) > min(epsilon, delta * exp(-H(p))): the flatter p, the less is asked. Of all branches accepted
this way the longest is kept, the one of higher probability if two are as long. It does not sample: what is drafted
decides what is said, within what is plausible. The next token is drawn from p after the path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specresearch.kernels.tree import ancestors
from specresearch.types import Probs, Rng, Tree, UserError, Verdict, Verifier


class Typical(Verifier):
    lossy = "plausible drafts are accepted without chance, so the law of the output is not the target's"

    tv_bound = 1.0  # 1 - p(x) wherever x is accepted, and p(x) may be as small as the bar

    def __init__(self, *, posterior_threshold: float = 0.09, posterior_alpha: float = 0.3):
        for name, value in (("posterior_threshold", posterior_threshold), ("posterior_alpha", posterior_alpha)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise UserError(f"verifier.{name}={value}: use a number above 0 and up to 1")
        self.threshold, self.alpha = posterior_threshold, posterior_alpha

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        """Every node is judged at once, so this reads p at all of them [B, N, V]."""
        law = p.all()
        above = tree.parent.clamp(min=0)
        rows = torch.arange(law.shape[0], device=law.device)
        mass = law[rows[:, None], above, tree.tokens.clamp(min=0)]  # p(token of the node | its parent) [B, N]
        plausible = (mass > self._bar(law).gather(1, above)) & tree.valid & (tree.parent >= 0)
        plausible[:, 0] = True
        line = ancestors(tree.parent)  # [B, N, N], the node itself included
        whole = (~line | plausible[:, None]).all(-1) & tree.valid
        likely = torch.where(line & whole[..., None], mass.log()[:, None], 0.0)
        likely[..., 0] = 0.0
        depth = torch.where(whole, tree.depth, -1)
        best = torch.where(depth == depth.amax(1, keepdim=True), likely.sum(-1), -torch.inf).argmax(1)
        kept = line[rows, best]  # [B, N]
        path = torch.where(kept, torch.arange(kept.shape[1], device=kept.device), kept.shape[1]).sort(1).values
        path = torch.nn.functional.pad(path, (0, tree.levels), value=kept.shape[1])[:, : tree.levels + 1]
        return Verdict(torch.where(path < kept.shape[1], path, -1), kept.sum(1), rng.pick(law[rows, best]))

    def _bar(self, law: Tensor) -> Tensor:
        """[B, N, V] -> the probability that a child must exceed [B, N]"""
        entropy = -torch.special.xlogy(law, law).sum(-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.threshold)
