"""EAGLE-3 by training-time test (Li et al., arXiv:2503.01840): the head learns on its own outputs, step after step.

Step i at place t: the state is the head's output of step i-1 at t (of step 0: the projected features of token t), the
embedded token is t+1+i, the RoPE position t+i, the target law that after token t+1+i. A query sees the keys of step 0 up
to t, which come from real features, and those of its own place in the later steps: as in drafting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specresearch.kernels.sampling import raise_half
from specresearch.models.eagle import EagleHead, Growing, rotate
from specresearch.training.packs import Pack


@dataclass(frozen=True)
class Teacher:
    """The target's laws over the draft vocabulary, at the places whose next token it chose itself."""

    p: Tensor  # [J, draft]
    row: Tensor  # [T] where a place's law is, -1 if it has none

    @staticmethod
    @torch.no_grad()
    def of(pack: Pack, normed: Tensor, matrix: Tensor, member: Tensor) -> Teacher:
        """`normed` [T, H] features after the final norm, `matrix` [draft, H] the target's rows of the draft vocabulary."""
        following = pack.tokens.roll(-1)
        good = (pack.left >= 1) & pack.chosen.roll(-1) & member[following]
        row = torch.where(good, good.cumsum(0) - 1, -1)
        return Teacher(raise_half(normed[good] @ matrix.t()).softmax(-1), row)


def unroll(
    head: EagleHead, pack: Pack, features: Tensor, steps: int, keep: float = 1.0, dice: torch.Generator | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The head's states, step by step: (step, places [R], states [R, H]). `features` [T, F] of the head's taps.

    Places are those whose guess the target chose. `keep` = share of them, drawn at random, with which each further step
    goes on: later steps cost as much as the first and teach less.
    """
    cache = Growing()
    there = pack.left >= 1
    wanted = there & pack.chosen.roll(-2) & (pack.left >= 2)
    around, places = (there & ~wanted).nonzero()[:, 0], wanted.nonzero()[:, 0]
    remember(head, pack.tokens[around + 1], head.project(features[around][None]), pack.position[around], cache)
    state, seen = head.project(features[places][None]), [around]
    for step in range(steps):
        if step:
            stay = (pack.left[places] >= 2 + step) & pack.chosen[(places + 2 + step).clamp(max=len(pack.chosen) - 1)]
            if keep < 1:
                stay &= torch.rand(len(places), generator=dice, device=places.device) < keep
            places, state = places[stay], state[:, stay]
        if not len(places):
            return
        seen.append(places)
        mask = torch.cat([_visible(pack, places, other, first=n < 2) for n, other in enumerate(seen)], 1)
        tokens, positions = pack.tokens[places + 1 + step], pack.position[places] + step
        state = head(tokens[None], state, positions[None], mask[None], cache)
        yield step, places, state[0]


def remember(head: EagleHead, tokens: Tensor, state: Tensor, positions: Tensor, cache: Growing) -> None:
    """Write the keys and values of places at which nothing is learned; what else the layer would do there is left out."""
    layer, attention = head.midlayer, head.midlayer.self_attn
    inputs = torch.cat([layer.input_layernorm(head.embed_tokens(tokens[None])), layer.hidden_norm(state)], -1)
    angles = positions[None, :, None] * attention.frequencies.to(positions.device)
    cos, sin = angles.cos().to(inputs.dtype)[:, None], angles.sin().to(inputs.dtype)[:, None]
    key, value = (
        project(inputs).view(1, len(tokens), -1, head.config.head_dim).transpose(1, 2)
        for project in (attention.k_proj, attention.v_proj)
    )
    cache.write(0, rotate(key, cos, sin), value)


def _visible(pack: Pack, query: Tensor, key: Tensor, first: bool) -> Tensor:
    """bool [queries, keys]: of step 0 all of the dialogue up to the query's place, of later steps the place itself."""
    if not first:
        return query[:, None] == key
    return (pack.dialogue[query][:, None] == pack.dialogue[key]) & (query[:, None] >= key)


def cross_entropies(
    head: EagleHead,
    pack: Pack,
    features: Tensor,
    teacher: Teacher,
    steps: int,
    keep: float,
    dice: torch.Generator | None,
) -> list[Tensor]:
    """Of the head's law with the target's, on the draft vocabulary: one mean for each step."""
    each = []
    for step, places, state in unroll(head, pack, features, steps, keep, dice):
        row = teacher.row[places + 1 + step]
        logits = raise_half(head.logits(state[row >= 0]))
        each.append(F.cross_entropy(logits, teacher.p[row[row >= 0]]))
    return each
