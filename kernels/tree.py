"""Tree arithmetic from parent pointers. Legend: B batch, N nodes (root = 0, parent < child), D levels; -1 = none."""

from __future__ import annotations

import torch
from torch import Tensor


def ancestors(parent: Tensor) -> Tensor:
    """parent [B, N] -> bool [B, N, N]: entry (i, j) says that j is i itself or an ancestor of i."""
    nodes = parent.shape[1]
    index = torch.arange(nodes, device=parent.device)
    reach = (parent[..., None] == index) | (index[:, None] == index)
    for _ in range((nodes - 1).bit_length()):  # reach doubles with each squaring
        reach = torch.matmul(reach.float(), reach.float()) > 0
    return reach


def links(parent: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """First child and next sibling of every node, [B, N] each; nodes that are not valid are linked by nobody."""
    nodes = parent.shape[1]
    index = torch.arange(nodes, device=parent.device)
    child = (parent[:, None, :] == index[:, None]) & valid[:, None, :]  # (i, c): c is a child of i
    sibling = (parent[:, None, :] == parent[..., None]) & (index > index[:, None]) & valid[:, None, :]
    sibling[:, 0] = False
    return _first(child), _first(sibling)


def _first(mask: Tensor) -> Tensor:
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)


def node_paths(parent: Tensor, tokens: Tensor, levels: int) -> Tensor:
    """Tokens from below the root down to each node, [B, N, levels], -1 padded at the end."""
    batch, nodes = parent.shape
    reach = ancestors(parent)
    reach[..., 0] = False  # the root is history, not path
    rank = reach.long().cumsum(-1) - 1
    path = torch.full((batch, nodes, levels + 1), -1, dtype=torch.long, device=parent.device)
    rank = torch.where(reach, rank, levels)  # everything else lands in the spare last column
    path.scatter_(-1, rank, tokens[:, None].expand(-1, nodes, -1))
    return path[..., :levels]
