"""EAGLE-2's tree (Li et al. 2024, arXiv:2406.16858): grow a beam, then keep the nodes of highest joint probability."""

from __future__ import annotations

import torch

from specresearch.kernels.graph import constant
from specresearch.kernels.tree import organize
from specresearch.trees.growth import Growth, positive, resolve_draw
from specresearch.types import Ask, Step, Tree, TreePolicy, UserError


class DynamicTree(TreePolicy):
    """Re-ranking drops nodes after they were revealed, so children count as points whatever way they were chosen."""

    law = "point"
    growth = "pruned_after_reveal"

    def __init__(self, *, depth: int, topk: int, size: int, temperature: float, draw: str | None = None):
        if "auto" in map(str, (depth, topk, size)):
            raise UserError("tree=dynamic has a fixed shape: use tree=auto, which chooses depth and size in every step")
        positive(depth=depth, topk=topk, size=size)
        if size < depth + 1:
            raise UserError(
                f"tree.size={size} cannot hold tree.depth={depth} levels and the root: "
                f"use tree.size={depth + 1} or more, or tree.depth={max(size - 1, 1)}"
            )
        self.draw = resolve_draw(draw, temperature, "topk")
        self.temperature = None if self.draw == "topk" else temperature
        self.depth, self.topk = depth, topk
        self.size = min(size, 1 + topk + (depth - 1) * topk * topk)
        self.width = topk

    @property
    def asked(self) -> int:
        return 1 + (self.depth - 1) * self.topk

    def smaller(self) -> list[DynamicTree]:
        """A beam of few branches need not lie within one of more: what is worse at first may be better later."""
        size = self.depth + 1  # re-ranking asks nothing
        return [
            DynamicTree(depth=self.depth, topk=topk, size=size, temperature=self.temperature or 0.0, draw=self.draw)
            for topk in range(1, self.topk + 1)
        ]

    def grow(self, step: Step, ask: Ask) -> Tree:
        batch, device = step.root.shape[0], step.root.device
        total = torch.zeros(batch, 1, device=device)
        if not self.goes_on(step, 0, total):
            return Tree.of_root(step)
        growth = Growth(step, ask, self.depth)
        # Candidates carry flat numbers, the root's is 0; a child's number is always above its parent's.
        tokens, totals, parents, levels = [step.root[:, None]], [total], [], [0]
        frontier = torch.zeros(batch, 1, dtype=torch.long, device=device)
        parents.append(frontier - 1)
        slots, heads = frontier, tokens[0]  # of the frontier: draft slots and tokens
        while levels[-1] == 0 or self.goes_on(step, levels[-1], total):
            score, q = growth.root() if levels[-1] == 0 else growth.expand(slots, heads)
            start = growth.depth.shape[1] - frontier.shape[1]  # draft slot of the frontier's first node
            child, logp = growth.children(score, q, self.topk, self.draw)
            width, first = child.shape[-1], len(levels)
            tokens.append(child.flatten(1))
            totals.append((total[..., None] + logp).flatten(1))
            parents.append(frontier[..., None].expand(-1, -1, width).flatten(1))
            levels += [levels[-1] + 1] * tokens[-1].shape[1]
            best = _best(totals[-1], self.topk)
            frontier, slots, heads = first + best, start + best // width, tokens[-1].gather(1, best)
            total = totals[-1].gather(1, best)
        return self._prune(torch.cat(tokens, 1), torch.cat(totals, 1), torch.cat(parents, 1), levels, step)

    def goes_on(self, step: Step, depth: int, total: torch.Tensor) -> bool:
        """Whether to ask about the nodes at `depth` whose log path probabilities are `total` [B, W]."""
        return depth < self.depth

    def keeps(self, step: Step, total: torch.Tensor, depth: torch.Tensor) -> int:
        """How many of the candidates stay, the root counted: log path probabilities [B, M], depths [M]."""
        return self.size

    def _prune(
        self, tokens: torch.Tensor, total: torch.Tensor, parent: torch.Tensor, levels: list[int], step: Step
    ) -> Tree:
        """Keep the root and the best candidates, parents before children, siblings by falling probability."""
        batch, count = tokens.shape
        deep = constant(tuple(levels), total.device)
        size = self.keeps(step, total, deep)
        if size == 1:
            return Tree.of_root(step)
        kept = torch.cat(
            [torch.zeros_like(parent[:, :1]), 1 + organize(total[:, 1:], parent[:, 1:] - 1, size - 1, levels[-1])],
            1,
        )
        dead = total.gather(1, kept) == -torch.inf
        kept = (kept + dead * count).sort(1).values % count  # ascending, dead ones behind
        place = torch.zeros_like(parent).scatter(
            1, kept, torch.arange(kept.shape[1], device=kept.device).expand(batch, -1)
        )
        up = place.gather(1, parent.gather(1, kept).clamp(min=0))
        valid = total.gather(1, kept) > -torch.inf
        up = torch.where(valid, up, 0)
        up[:, 0] = -1
        score = total.gather(1, kept)
        return Tree(tokens.gather(1, kept), up, deep[kept], valid, score, self.law, self.growth, levels[-1])


def _best(total: torch.Tensor, count: int) -> torch.Tensor:
    return total.sort(dim=1, descending=True, stable=True).indices[:, :count]
