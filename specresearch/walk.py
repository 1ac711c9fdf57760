"""The walk that most acceptance rules share: from the root down, try the children of the accepted node in order."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specresearch.kernels.tree import links
from specresearch.types import Probs, Rng, Tree, Verdict


class Rule(Protocol):
    """What a sequential rule decides at one node, for all rows at once."""

    residual: Tensor  # [B, V] law of the next token, if no further child of the node is accepted

    def enter(self, p: Tensor, node: Tensor) -> None:
        """A new level: `p` [B, V] at `node` [B]."""
        ...

    def accept(self, child: Tensor, token: Tensor, trying: Tensor, rng: Rng) -> Tensor:
        """Judge one child [B] per row; rows where `trying` is False must not change -> bool [B]."""
        ...


def walk(tree: Tree, p: Probs, rule: Rule, rng: Rng) -> Verdict:
    """Fixed shapes throughout; on the CPU, where asking is free, loops end as soon as nothing is left to do."""
    batch, device = tree.tokens.shape[0], tree.tokens.device
    first_child, next_sibling = links(tree.parent, tree.valid)
    may_stop = device.type == "cpu"
    node = torch.zeros(batch, dtype=torch.long, device=device)
    path = torch.full((batch, tree.levels + 1), -1, dtype=torch.long, device=device)
    path[:, 0] = 0
    moving = torch.ones(batch, dtype=torch.bool, device=device)
    residual: Tensor | None = None
    for level in range(tree.levels + 1):
        if may_stop and not moving.any():
            break
        rule.enter(p(node), node)
        child = torch.where(moving, first_child.gather(1, node[:, None])[:, 0], -1)
        chosen = torch.full_like(node, -1)
        for _ in range(tree.tokens.shape[1] - 1 if level < tree.levels else 0):
            trying = child >= 0
            if may_stop and not trying.any():
                break
            at = child.clamp(min=0)[:, None]
            ok = rule.accept(at[:, 0], tree.tokens.gather(1, at)[:, 0], trying, rng) & trying
            chosen = torch.where(ok, child, chosen)
            child = torch.where(trying & ~ok, next_sibling.gather(1, at)[:, 0], -1)
        moved = chosen >= 0
        kept = rule.residual if residual is None else torch.where(moving[:, None], rule.residual, residual)
        residual = kept  # a row that stopped earlier keeps the residual of the node where it stopped
        moving = moving & moved
        node = torch.where(moving, chosen, node)
        if level < tree.levels:
            path[:, level + 1] = torch.where(moving, chosen, -1)
    assert residual is not None
    return Verdict(path, (path >= 0).sum(1), rng.pick(residual))
