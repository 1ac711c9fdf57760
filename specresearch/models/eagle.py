"""EAGLE draft heads as modules: EAGLE-1 and -2 (Li et al., arXiv:2401.15077, 2406.16858), EAGLE-3 (arXiv:2503.01840).

One decoder layer that reads, at position t, the embedding of token t+1 and a state: the target's features of token t, or
the head's own output where the target has not been yet. Its output is the next state, and gives the law of token t+2.
B batch, T queries, S visible keys, F features, H width of the head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specresearch.models.linear import Linear
from specresearch.models.vocabulary import DraftVocabulary, take_from_target
from specresearch.ranges import FLAG, MAPPING, Rule, number, optional, require, several, whole
from specresearch.types import Tap, UserError

SHARED = ("embed_tokens.weight", "lm_head.weight")  # what a head may take from the target
ROPES = ("default", "linear", "llama3")
FLAGS = ("bias", "qkv_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SIZES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "target_hidden_size")
FIELDS = {
    **dict.fromkeys((*SIZES, "vocab_size", "draft_vocab_size"), whole(most=1 << 24)),
    "taps": several(Rule(lambda v: v == "norm" or whole(0).holds(v), ""), "blocks of the target, e.g. [2, 15, 27]"),
    "rms_norm_eps": number(),
    "rope_theta": number(above=True),
    "rope_scaling": optional(MAPPING),
    "context": whole(),
    "window": optional(whole()),
    **dict.fromkeys(FLAGS, FLAG),
    "from_target": Rule(
        lambda v: isinstance(v, list | tuple) and all(isinstance(n, str) for n in v), "a list of names"
    ),
}
SCALES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class EagleConfig:
    """Everything that a head is, with our own names. Nothing is inherited from the target, its rotary base above all."""

    version: int  # 1: EAGLE-1 and -2; 3: EAGLE-3
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int  # = vocab_size: every token can be drafted
    target_hidden_size: int
    taps: tuple[Tap, ...]  # k = residual stream after k blocks, "norm" = after the final norm
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # {"rope_type": "linear" | "llama3", "factor": ...}
    context: int = 2048  # positions it was trained on
    window: int | None = None  # a position sees this many positions, itself included
    bias: bool = False  # of fc
    qkv_bias: bool = False
    norm_before_residual: bool = False  # the residual is the normed state, not the state itself
    norm_before_fc: bool = False  # one norm over all features
    fc_norm: bool = False  # or one norm per feature
    norm_output: bool = False  # the state that is fed back is the normed one
    from_target: tuple[str, ...] = ()  # of SHARED: not stored with the head

    def __post_init__(self) -> None:
        require(vars(self), FIELDS)
        require(self.rope_scaling or {}, dict.fromkeys(SCALES, number(above=True)), "rotary scaling: ")
        object.__setattr__(self, "taps", tuple(self.taps))
        object.__setattr__(self, "from_target", tuple(self.from_target))
        if self.rope_scaling is not None:  # older configs say "type"
            rest = {k: v for k, v in self.rope_scaling.items() if k not in ("type", "rope_type")}
            object.__setattr__(
                self, "rope_scaling", {"rope_type": self.rope, **rest} if self.rope != "default" else None
            )
        if self.version not in (1, 3):
            raise UserError(f"an EAGLE head has version 1 or 3, not {self.version}")
        if self.version == 1 and (self.taps != ("norm",) or self.draft_vocab_size != self.vocab_size):
            raise UserError('an EAGLE-1 head reads the one tap "norm" and drafts from the whole vocabulary')
        if self.version == 1 and self.target_hidden_size != self.hidden_size:
            raise UserError("an EAGLE-1 head is as wide as its target")
        if self.norm_before_fc and self.fc_norm:
            raise UserError("norm_before_fc and fc_norm exclude each other")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise UserError(
                f"{self.num_heads} heads of width {self.head_dim}, {self.num_kv_heads} of K and V: no such head"
            )
        if odd := set(self.from_target) - set(SHARED):
            raise UserError(
                f"from_target names {', '.join(sorted(odd))}: only {' and '.join(SHARED)} can be the target's"
            )
        if self.rope not in ROPES:
            raise UserError(f"rotary scaling {self.rope!r} is not supported: a head may have {', '.join(ROPES)}")

    @property
    def rope(self) -> str:
        scaling = self.rope_scaling or {}
        return str(scaling.get("rope_type", scaling.get("type", "default")))


class KeyValues(Protocol):
    """Where a head's K and V live. `models.cache.SlotCache` is one."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """K, V [B, heads, T, width] of the new tokens -> all visible ones [B, heads, S, width]."""
        ...


class Growing:
    """K and V one behind the other as they come: for whole sequences, as in training."""

    def __init__(self) -> None:
        self.seen: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.seen is not None:
            key, value = torch.cat([self.seen[0], key], 2), torch.cat([self.seen[1], value], 2)
        self.seen = key, value
        return key, value


class EagleHead(nn.Module):
    """The tensors are named as SGLang and SafeAILab name EAGLE-3's; EAGLE-1's `layers.0.` is `midlayer.` here too."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = c = config
        features = len(c.taps) * c.target_hidden_size
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.fc = Linear(features if c.version == 3 else 2 * c.hidden_size, c.hidden_size, bias=c.bias)
        if c.norm_before_fc:
            self.input_norm = nn.RMSNorm(features, c.rms_norm_eps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in c.taps)
        self.midlayer = Layer(c)
        if c.version == 3:
            self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.vocabulary = DraftVocabulary(c.vocab_size, c.draft_vocab_size)

    def project(self, features: Tensor) -> Tensor:
        """The target's features [B, T, F], taps side by side in the order of `config.taps` -> state [B, T, H]."""
        c = self.config
        if c.version == 1:
            return features
        if c.norm_before_fc:
            features = self.input_norm(features)
        if c.fc_norm:
            parts = features.split(c.target_hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
        return self.fc(features)

    def forward(self, tokens: Tensor, state: Tensor, positions: Tensor, mask: Tensor, cache: KeyValues) -> Tensor:
        """Token t+1 [B, T] and state [B, T, H] of each position t [B, T] -> the next state [B, T, H].

        `mask` [B or 1, T, S] bool over the keys that `cache` shows: True may be seen; each query must see one at least.
        """
        c, embedded = self.config, self.embed_tokens(tokens)
        if c.version == 1:
            state = self.fc(torch.cat([embedded, state], -1))
        state = self.midlayer(embedded, state, positions, mask, cache)
        return self.norm(state) if c.norm_output else state

    def logits(self, state: Tensor) -> Tensor:
        """State [B, T, H] -> logits [B, T, draft_vocab_size] of the token after the embedded one."""
        c = self.config
        return self.lm_head(self.norm(state) if c.version == 3 and not c.norm_output else state)

    def adopt(self, embedding: Tensor, output: Tensor) -> None:
        """Take what the config declares from the target's `embedding` and `output` [V, H] matrices: shared and frozen."""
        take_from_target(self, self.config.from_target, embedding, output)


class Layer(nn.Module):
    """A Llama layer. EAGLE-1's has no norm before its attention; EAGLE-3's reads two normed inputs side by side."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = c = config
        if c.version == 3:
            self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.hidden_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, c.hidden_size * (2 if c.version == 3 else 1))
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, mask: Tensor, cache: KeyValues) -> Tensor:
        inputs = state
        if self.config.version == 3:
            normed = self.hidden_norm(state)
            inputs = torch.cat([self.input_layernorm(embedded), normed], -1)
            state = normed if self.config.norm_before_residual else state
        state = state + self.self_attn(inputs, positions, mask, cache)
        return state + self.mlp(self.post_attention_layernorm(state))


class Attention(nn.Module):
    def __init__(self, config: EagleConfig, width: int):
        super().__init__()
        self.config = c = config
        self.q_proj = Linear(width, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(width, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(width, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.frequencies = rotary_frequencies(c)  # no buffer, since `.to(dtype)` would round it

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cache: KeyValues) -> Tensor:
        batch, length, _ = x.shape
        self.frequencies = self.frequencies.to(x.device)  # moves once
        angles = positions[..., None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
        q, k, v = (
            project(x).view(batch, length, -1, self.config.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        keys, values = cache.write(0, rotate(k, cos, sin), v)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), keys, values, attn_mask=mask[:, None], enable_gqa=keys.shape[1] != q.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, width] by angles [B or 1, 1, T, width/2]; Llama's halves, not pairs."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotary_frequencies(config: EagleConfig) -> Tensor:
    """-> float64 [head_dim / 2]"""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim
    plain = config.rope_theta**-steps
    if config.rope == "default":
        return plain
    scaling = dict(config.rope_scaling or {})
    try:
        factor = float(scaling["factor"])
        if config.rope == "linear":
            return plain / factor
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    except KeyError as missing:
        raise UserError(f"rotary scaling {config.rope!r} lacks {missing}") from None
    if low >= high:
        raise UserError(f"rotary scaling: low_freq_factor={low:g} is not below high_freq_factor={high:g}")
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # few turns over the old context: slowed; many: kept
    return plain / factor * (1 - keep) + plain * keep
