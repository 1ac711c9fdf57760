"""Block verification: a drafted chain is judged as a whole, and its longest acceptable prefix is kept.

Legend: B batch, V vocabulary. Sun et al. 2024 (arXiv:2403.10444), algorithm 2; torch alone, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specresearch.kernels.tree import links
from specresearch.kernels.verify import plain
from specresearch.types import Probs, Rng, Tree, Verdict


def block(tree: Tree, p: Probs, rng: Rng) -> Verdict:
    """Verify a chain that was drawn from `tree.q`; shorter chains end where no node is valid.

    With w_i = min(1, w_{i-1} p(x_i) / q(x_i)) and Z_i = sum (w_i p - q)+ after x_i, prefix i is fit with probability
    Z_i / (Z_i + 1 - w_i), the whole chain with probability w_n. The last fit prefix is kept, and the next token drawn from
    (w_i p - q)+; after the whole chain, where nothing was drawn and q is 0, that is p.
    """
    if tree.q is None:
        return plain(tree, p, rng)
    first_child, _ = links(tree.parent, tree.valid)
    batch, device = tree.tokens.shape[0], tree.tokens.device
    rows = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.long, device=device)
    weight = torch.ones(batch, dtype=torch.float64, device=device)
    line, kept = [node], torch.zeros_like(node)
    residual = torch.empty(0)
    for level in range(tree.levels + 1):
        here = node.clamp(min=0)
        child = torch.where(node >= 0, first_child[rows, here], -1)
        law = p(here)
        q = torch.where((child >= 0)[:, None], tree.q[rows, here], 0.0).to(law.dtype)
        rest = (weight[:, None].to(law.dtype) * law - q).clamp(min=0)
        if level == 0:  # the empty prefix is always fit
            residual = torch.where(rest.sum(1, keepdim=True) > 0, rest, law)  # p = q: only rounding can reject all
        else:
            fitness = torch.where(child >= 0, _fitness(rest.sum(1), weight), weight)
            fit = rng.accept(here, torch.where(node >= 0, fitness, 0.0))
            residual = torch.where(fit[:, None], rest, residual)
            kept = torch.where(fit, level, kept)
        weight = _weight(weight, law, q, tree.tokens[rows, child.clamp(min=0)])
        node = child
        line.append(child)
    path = torch.stack(line[:-1], 1)
    place = torch.arange(tree.levels + 1, device=device)
    return Verdict(torch.where(place <= kept[:, None], path, -1), kept + 1, rng.pick(residual))


def _fitness(mass: Tensor, weight: Tensor) -> Tensor:
    """Z / (Z + 1 - w) [B]; where both vanish (p = q) all that follows is fit, so 0 never draws from an empty residual."""
    total = mass + (1 - weight)
    return torch.where(total > 0, mass / total, 0.0)


def _weight(weight: Tensor, law: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, w p(x) / q(x)) in float64; a token that q cannot draw ends the chain."""
    px, qx = (x.gather(1, token[:, None])[:, 0].double() for x in (law, q))
    return torch.where(qx > 0, weight * px / qx, 0.0).clamp(max=1)
