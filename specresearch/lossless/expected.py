"""Closed forms of how much each acceptance rule keeps, to set beside measurements. All laws are given, nothing is random.

p, q [V] are the target's and the draft's law after some prefix; a `Laws` gives one for every prefix. "Accepted" is the chance
that one of a node's children is kept; for chains, the expected number of drafts kept (the bonus token comes on top).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations, product

import torch
from torch import Tensor

from specresearch.kernels.spectr import any_accepted, overlap, solve_rho

Laws = Callable[[tuple[int, ...]], Tensor]


def rejection(p: Tensor, q: Tensor, children: int = 1) -> float:
    """`children` drawn iid, judged in turn (SpecInfer, arXiv:2305.09781): 1 - prod (1 - sum min(p_i, q)), where p_1 = p and
    p_{i+1} = norm (p_i - q)+. One child: sum min(p, q) = 1 - TV (Leviathan et al., arXiv:2211.17192, theorem 3.5)."""
    lost = 1.0
    for _ in range(children):
        lost *= 1 - float(torch.minimum(p, q).sum())
        rest = (p - q).clamp(min=0)
        if float(rest.sum()) <= 0:
            return 1.0
        p = rest / rest.sum()
    return 1 - lost


def without_replacement(p: Tensor, q: Tensor, children: int) -> float:
    """Sequoia (arXiv:2402.12374), by summing over all ordered draws: for small vocabularies."""
    total = 0.0
    for draw in permutations(range(len(q)), children):
        chance, lost, left, rest = 1.0, 1.0, q, p
        for token in draw:
            chance *= float(left[token])
            if chance <= 0:
                break
            lost *= 1 - min(1.0, float(rest[token] / left[token]))
            rest, left = _norm((rest - left).clamp(min=0)), _norm(left.scatter(0, torch.tensor(token), 0.0))
        total += chance * (1 - lost)
    return total


def point(p: Tensor, children: Sequence[int]) -> float:
    """Children that are a function of the past, under the point-mass rule, the target-only rule or sample-and-match: p of the
    set of children."""
    return float(p[sorted(set(children))].sum())


def sample_and_match(p: Tensor, q: Tensor, children: int = 1) -> float:
    """Children drawn iid: sum p (1 - (1 - q)^k); one child: sum p q."""
    return float((p * (1 - (1 - q) ** children)).sum())


def spectr(p: Tensor, q: Tensor, children: int) -> float:
    """K-SEQ (arXiv:2310.15141): 1 - (1 - beta)^k with beta = sum min(q, p / rho) at the rho solved for."""
    count = torch.tensor([children])
    beta = overlap(p[None], q[None], solve_rho(p[None], q[None], count))[1]
    return float(any_accepted(beta, count))


def chain(p: Laws, q: Laws, length: int, vocab: int) -> float:
    """Drafts kept of a chain by token-by-token rejection: the sum over all prefixes of prod min(p, q)."""
    return _kept(length, vocab, lambda kept, _, px, qx: kept * min(px, qx), p, q)


def block(p: Laws, q: Laws, length: int, vocab: int) -> float:
    """Drafts kept by block verification (arXiv:2403.10444), and by traversal on a chain: the sum over all prefixes of
    W(x_1..x_i) = min(q(x_1..x_i), W(x_1..x_{i-1}) p(x_i))."""
    return _kept(length, vocab, lambda kept, drawn, px, _: min(drawn, kept * px), p, q)


def _kept(length: int, vocab: int, extend: Callable[[float, float, float, float], float], p: Laws, q: Laws) -> float:
    """Sum over all prefixes of what `extend`(kept before, chance of the draft, p(x), q(x)) makes of them."""
    total = 0.0
    for size in range(1, length + 1):
        for prefix in product(range(vocab), repeat=size):
            kept = drawn = 1.0
            for i, token in enumerate(prefix):
                px, qx = float(p(prefix[:i])[token]), float(q(prefix[:i])[token])
                drawn *= qx
                kept = extend(kept, drawn, px, qx)
            total += kept
    return total


def _norm(weights: Tensor) -> Tensor:
    total = weights.sum()
    return weights / total if float(total) > 0 else weights
