"""Counter-based randomness: a uniform is a hash of (prompt, round, stream, slot), never of the batch around it."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

DRAFT, ACCEPT, RESIDUAL = 1, 2, 3  # streams never share a uniform: independence of draft and acceptance needs it


def row_key(seed: int, prompt_id: int | str, turn: int) -> int:
    """The 63-bit key of one answer; the same whatever else is in the batch."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP, _MUL1, _MUL2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 arithmetically; the hash needs a logical shift


def mix(x: Tensor) -> Tensor:
    """splitmix64's output function (Steele, Lea, Flood 2014) on int64 tensors."""
    x = x + _STEP
    x = (x ^ _shift(x, 30)) * _MUL1
    x = (x ^ _shift(x, 27)) * _MUL2
    return x ^ _shift(x, 31)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Smallest index whose cumulated weight exceeds uniform * total; weights [..., V], uniform [...] in [0, 1) -> [...].

    An index of weight 0 is never returned; -1 where the weights are NaN or all 0.
    """
    cumulated = weights.double().cumsum(-1)
    total = cumulated[..., -1:].contiguous()
    index = torch.searchsorted(cumulated, uniform.double().unsqueeze(-1) * total, right=True)
    last = torch.searchsorted(cumulated, total)  # rounding may push uniform * total up to total
    index = torch.minimum(index, last).squeeze(-1)
    return torch.where(total.squeeze(-1) > 0, index, -1)


class CounterRng:
    """Production randomness for one step: `key` [B] from `row_key`, `round` [B] = that row's step count."""

    def __init__(self, key: Tensor, round: Tensor):
        self.state = mix(key ^ mix(round))
        self.picks = 0

    def uniform(self, stream: int, slot: Tensor | int) -> Tensor:
        """float64 in [0, 1) [B], 53 bits: 0 can occur, 1 cannot."""
        # full() fills on the device; a tensor made from a number would wait for it.
        at = slot if isinstance(slot, Tensor) else torch.full((), slot, dtype=torch.long, device=self.state.device)
        offset = at * 4 + stream
        return _shift(mix(self.state ^ mix(offset)), 11).double() * 2.0**-53

    def accept(self, coin_id: Tensor | int, threshold: Tensor) -> Tensor:
        return self.uniform(ACCEPT, coin_id) < threshold

    def pick(self, weights: Tensor) -> Tensor:
        self.picks += 1
        return inverse_cdf(weights, self.uniform(RESIDUAL, self.picks))

    def draw(self, weights: Tensor, slot: int) -> Tensor:
        width = weights.shape[1]
        uniforms = [self.uniform(DRAFT, slot * 4096 + w) for w in range(width)]
        return inverse_cdf(weights, torch.stack(uniforms, 1))
