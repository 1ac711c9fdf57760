"""Scores of an emitted token: functions of token and prefix alone, so that what exceeds their mean is a martingale difference.

If token x follows p, a score g has the mean sum p g and the variance sum p g^2 - mean^2, both known exactly, whatever
the prefix. Sums over tokens and prompts pool with no correction. A score must not see the draft that was realised: a
fixed weak draft q of the prefix alone takes its place, and points at where drafts push the output.

Legend: n places, K tokens at each, V vocabulary, S scores.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specresearch.types import UserError

NAMES = ("surprisal", "ratio", "argmax", "above", "rank")
ROWS = 32  # scored at once, so that their rows [ROWS, V] stay in a processor's cache
CLIP = 4.0  # nats; a bounded score can be bet on


@dataclass(frozen=True)
class Scored:
    excess: Tensor  # [n, S] float64, score minus its mean under p
    variance: Tensor  # [n, S] of it under p
    range: Tensor  # [n, S] largest minus smallest value (or more): what a shift of TV 1 could add to the mean
    impossible: Tensor  # [n] bool, p(token) = 0
    witness: Tensor  # [n] p(A) of the set A = {q > p}

    def __len__(self) -> int:
        return len(self.excess)


def score(p: Tensor, q: Tensor, tokens: Tensor) -> Scored:
    """The battery for `tokens` [n] under p [n, V], with the weak draft q [n, V].

    surprisal  -log p less the entropy, clipped to 4 nats, over 4: sees a temperature;
    ratio      (q - p) / (q + p), the score of the mixture of p and q: sees a wrong acceptance or residual;
    argmax     1{x = argmax q};  above  1{q(x) > p(x)}, which bounds the total variation from below;
    rank       mid-PIT: the mass of the tokens that are likelier than x, and half its own, less 1/2.

    Raises UserError where p is not a distribution (NaN) or a token lies outside the vocabulary.
    """
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < p.shape[1]:
        raise UserError(f"token {int(tokens.max())} lies outside the target's vocabulary of {p.shape[1]}")
    if bool(p.sum(1).isnan().any()):
        raise UserError("the target's law is NaN at a token that is to be judged: try target.dtype=float32")
    parts = [_score(*part) for part in zip(*(x.split(ROWS) for x in (p, q, tokens)))]
    return Scored(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Scored)))


def _score(p: Tensor, q: Tensor, tokens: Tensor) -> Scored:
    excess, variance, range, impossible, witness = battery(p, q, tokens[:, None])
    return Scored(excess[:, 0], variance, range, impossible[:, 0], witness)


def battery(p: Tensor, q: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All scores of K tokens `at` [n, K] at each place.

    -> excess [n, K, S], variance [n, S], range [n, S], impossible [n, K], witness [n]
    """
    best = q.argmax(1, keepdim=True)
    surprise, low = _surprise(p)
    above = q > p
    witness = (p * above).sum(1, keepdim=True)
    columns = [
        _of(p, surprise, at),
        _of(p, (q - p).div_((q + p).clamp_(min=torch.finfo(p.dtype).tiny)), at),
        _bernoulli(p.gather(1, best), at == best),
        _bernoulli(witness, above.gather(1, at)),
        mid_rank(p, at),
    ]
    excess, variance = torch.stack([e for e, _ in columns], -1), torch.cat([v for _, v in columns], 1)
    one = torch.ones_like(variance[:, :1])
    ranges = torch.cat([1 - low.double(), 2 * one, one, one, one], 1)
    return excess, variance.clamp(min=0), ranges, p.gather(1, at) == 0, witness[:, 0].double()


def _surprise(p: Tensor) -> tuple[Tensor, Tensor]:
    """-> the clipped score [n, V], its least value [n, 1]"""
    surprise = p.log().neg_()
    entropy = torch.special.xlogy(p, p).sum(1, keepdim=True).neg()
    surprise.sub_(entropy).clamp_(-CLIP, CLIP).div_(CLIP)
    return surprise, surprise.amin(1, keepdim=True)


def surprisal(p: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The first score alone, for tokens `at` [n, K] -> excess [n, K], variance [n, 1]"""
    return _of(p, _surprise(p)[0], at)


def top(p: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the token is p's own argmax -> excess [n, K], variance [n, 1]"""
    best = p.argmax(1, keepdim=True)
    return _bernoulli(p.gather(1, best), at == best)


def mid_rank(p: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Mid-PIT in the order of falling p, ties by index: its mean is 1/2 and its variance (1 - sum p^3) / 12. One token a
    row needs no sort."""
    own = p.gather(1, at)
    if at.shape[1] == 1:
        before = (p * ((p > own) | ((p == own) & (torch.arange(p.shape[1], device=p.device) < at)))).sum(
            1, keepdim=True
        )
    else:
        ordered, order = p.sort(dim=1, descending=True, stable=True)
        before = torch.empty_like(p).scatter_(1, order, ordered.cumsum(1) - ordered).gather(1, at)
    return _pit(p, own, before)


def mid_pit(p: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Mid-PIT of one token a row [n, 1] in the order of the ids: within p(x) / 2, the uniform by which x was drawn."""
    before = (p * (torch.arange(p.shape[1], device=p.device) < at)).sum(1, keepdim=True)
    return _pit(p, p.gather(1, at), before)


def _pit(p: Tensor, own: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    return (before + own / 2 - 0.5).double(), ((1 - (p * p * p).sum(1, keepdim=True)) / 12).double()


def _of(p: Tensor, g: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    weighted = p * g
    mean, square = weighted.sum(1, keepdim=True).double(), (weighted * g).sum(1, keepdim=True).double()
    return g.gather(1, at).double() - mean, square - mean * mean


def _bernoulli(chance: Tensor, hit: Tensor) -> tuple[Tensor, Tensor]:
    chance = chance.double()
    return hit.double() - chance, chance * (1 - chance)
