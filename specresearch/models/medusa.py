"""Medusa heads (Cai et al., arXiv:2401.10774): head k guesses the token k + 2 places after the one whose feature it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specresearch.models.linear import Joined, Linear
from specresearch.models.vocabulary import DraftVocabulary, take_from_target
from specresearch.ranges import FLAG, Rule, require, whole
from specresearch.types import Tap, UserError

FIELDS = {
    "heads": whole(most=64),
    "layers": whole(0, most=64),
    **dict.fromkeys(("hidden_size", "vocab_size", "draft_vocab_size"), whole(most=1 << 24)),
    **dict.fromkeys(("tied", "block_bias"), FLAG),
    "from_target": Rule(lambda v: isinstance(v, list | tuple), "a list of names"),
}


@dataclass(frozen=True)
class MedusaConfig:
    heads: int
    layers: int  # residual blocks per head
    hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int  # = vocab_size: every token can be drafted
    tied: bool = False  # all heads share one vocabulary matrix
    block_bias: bool = True
    from_target: tuple[str, ...] = ()  # ("lm_head.weight",): the shared matrix is the target's, and not stored

    def __post_init__(self) -> None:
        require(vars(self), FIELDS)
        object.__setattr__(self, "from_target", tuple(self.from_target))
        if self.from_target not in ((), ("lm_head.weight",)) or (self.from_target and not self.tied):
            raise UserError("Medusa heads may take lm_head.weight from the target, if they are tied, and nothing else")

    @property
    def taps(self) -> tuple[Tap, ...]:
        return ("norm",)


class ResBlock(nn.Module):
    """x + SiLU(W x + b), W = 0 at first, so that a new head says nearly what the target's own head says."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.linear = Linear(width, width, bias=bias)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Tensors: `blocks.{head}.{layer}.linear.weight|bias`, then `lm_head.weight` if tied, else `lm_heads.{head}.weight`."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = c = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(c.hidden_size, c.block_bias) for _ in range(c.layers))) for _ in range(c.heads)
        )
        if c.tied:
            self.lm_head = Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        else:
            self.lm_heads = nn.ModuleList(Linear(c.hidden_size, c.draft_vocab_size, bias=False) for _ in range(c.heads))
        self.vocabulary = DraftVocabulary(c.vocab_size, c.draft_vocab_size)
        heads: Any = self.blocks
        self.first = Joined(*(blocks[0].linear for blocks in heads)) if c.layers else None

    def hidden(self, features: Tensor) -> Tensor:
        """Features [..., H] after the target's final norm -> what each head lays against the vocabulary [..., heads, H]."""
        c, heads = self.config, cast(Any, self.blocks)
        x = features[..., None, :].expand(*features.shape[:-1], c.heads, -1)
        if self.first is None:
            return x
        x = x + F.silu(self.first(features).unflatten(-1, (c.heads, c.hidden_size)))  # all heads read the same
        deeper = [blocks[1:](x[..., k, :]) for k, blocks in enumerate(heads)] if c.layers > 1 else None
        return x if deeper is None else torch.stack(deeper, -2)

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., H] of token t -> logits [..., heads, draft_vocab_size] of the tokens t+2, t+3, ..."""
        hidden = self.hidden(features)
        if self.config.tied:
            return self.lm_head(hidden)
        return torch.stack([head(hidden[..., k, :]) for k, head in enumerate(self.lm_heads)], -2)

    def adopt(self, embedding: Tensor, output: Tensor) -> None:
        """Take the shared vocabulary matrix from the target, if the config says so: shared and frozen."""
        take_from_target(self, self.config.from_target, embedding, output)
