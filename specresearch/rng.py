"""Counter-based randomness: a uniform is a hash of (prompt, round, stream, slot), never of the batch around it."""

from __future__ import annotations

import hashlib
from functools import cached_property

import torch
from torch import Tensor

from specresearch.kernels.sampling import pick

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


class CounterRng:
    """Production randomness for one step: `key` [B] from `row_key`, `round` [B] = that row's step count."""

    def __init__(self, key: Tensor, round: Tensor):
        self.key, self.round, self.picks = key, round, 0

    @cached_property
    def state(self) -> Tensor:
        """Made when chance is needed for the first time in the step, which at temperature 0 it never is."""
        return mix(self.key ^ mix(self.round))

    def uniform(self, stream: int, slot: Tensor | int) -> Tensor:
        """float64 in [0, 1), 53 bits: 0 can occur, 1 cannot. `slot` is one for all rows, or [B], or [B, N] -> its shape."""
        # full() fills on the device; a tensor made from a number would wait for it.
        at = slot if isinstance(slot, Tensor) else torch.full((), slot, dtype=torch.long, device=self.state.device)
        offset = at * 4 + stream
        state = self.state if at.dim() < 2 else self.state[:, None]
        return _shift(mix(state ^ mix(offset)), 11).double() * 2.0**-53

    def accept(self, coin_id: Tensor | int, threshold: Tensor) -> Tensor:
        return self.uniform(ACCEPT, coin_id) < threshold

    def pick(self, weights: Tensor) -> Tensor:
        self.picks += 1
        return pick(weights, self.uniform(RESIDUAL, self.picks))

    def draw(self, weights: Tensor, slot: int) -> Tensor:
        width = weights.shape[1]
        uniforms = [self.uniform(DRAFT, slot * 4096 + w) for w in range(width)]
        return pick(weights, torch.stack(uniforms, 1))

    def uniforms(self, nodes: int) -> tuple[Tensor, Tensor]:
        """What `accept` of coins 0 .. nodes-1 and the next `pick` compare with -> [B, nodes], [B]"""
        self.picks += 1
        coins = torch.arange(nodes, device=self.state.device)[None]
        return self.uniform(ACCEPT, coins), self.uniform(RESIDUAL, self.picks)
