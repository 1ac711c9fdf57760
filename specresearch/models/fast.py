"""The forward of Llama-like models in few operators. What a pass of a few rows costs on a CPU beyond reading the weights is
mostly calls: transformers' makes about a thousand for SmolLM2, this one 450.

Without this file the adapter goes through transformers' own forward, which stays the reference of every check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specresearch.kernels.attention import tree_attention
from specresearch.models.cache import SlotCache
from specresearch.models.linear import Joined
from specresearch.types import Tap

FAMILY = ("llama", "mistral", "qwen2", "qwen3")  # config.model_type: one block, with or without biases and head norms


class View(NamedTuple):
    """What the nodes of a pass see, as `kernels.attention.tree_attention` takes it."""

    words: Tensor | None
    length: Tensor
    dense: Tensor | None


class FastForward:
    """Reads the weights of a model of the family where they are; keeps no state."""

    def __init__(self, model: Any, blocks: nn.ModuleList, head: nn.Module):
        base, config = model.base_model, model.config
        self.embed, self.final, self.head, self.rotary = base.embed_tokens, base.norm, head, base.rotary_emb
        self.width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.blocks = [_Block(block) for block in blocks]
        first: Any = blocks[0]  # a rank may have some of the heads
        self.heads = first.self_attn.q_proj.out_features // self.width
        self.shared = first.self_attn.k_proj.out_features // self.width

    @staticmethod
    def serves(model: Any) -> bool:
        """Whether `model` is of the family as transformers has it (a subclass may compute something else), on one device,
        with the attention that transformers chooses by itself."""
        config, devices = model.config, {p.device for p in model.parameters()}
        own = type(model).__module__.startswith(f"transformers.models.{config.model_type}.")
        usual = getattr(config, "hidden_act", None) == "silu" and config._attn_implementation == "sdpa"
        return own and config.model_type in FAMILY and usual and len(devices) == 1

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, view: View, keep: Tensor | None, taps: Sequence[Tap]
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [R, q] at positions [R, q] -> logits [R, q or 1, V], the taps' features [R, q, F]. `keep` [R] = the one
        query per row whose logits are wanted."""
        x = self.embed(tokens)
        cos, sin = self.rotary(x, positions)
        half = self.width // 2
        turn = cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]
        kept: dict[Tap, Tensor] = {0: x}
        for layer, block in enumerate(self.blocks):
            x = x + block.out(self._attend(layer, block, _norm(block.before, x), turn, cache, view))
            gate, up = block.gate_up(_norm(block.between, x)).chunk(2, -1)
            x = x + block.down(F.silu(gate) * up)
            kept[layer + 1] = x
        kept["norm"] = _norm(self.final, x)
        features = torch.cat([kept[tap] for tap in taps], -1) if taps else None
        asked = (
            kept["norm"] if keep is None else kept["norm"][torch.arange(len(keep), device=keep.device), keep][:, None]
        )
        return self.head(asked), features

    def _attend(
        self, layer: int, block: _Block, x: Tensor, turn: tuple[Tensor, Tensor], cache: SlotCache, view: View
    ) -> Tensor:
        mixed = block.qkv(x).unflatten(-1, (-1, self.width))  # [R, q, heads, width]
        pair, value = mixed.split([self.heads + self.shared, self.shared], 2)
        if block.query_norm is not None:
            query, key = pair.split([self.heads, self.shared], 2)
            pair = torch.cat([_norm(block.query_norm, query), _norm(block.key_norm, key)], 2)
        cos, sin = turn
        turned = pair * cos + pair.roll(self.width // 2, -1) * sin  # rounds as transformers' own
        query, key = turned.split([self.heads, self.shared], 2)
        keys, values = cache.write(layer, key.transpose(1, 2), value.transpose(1, 2))
        query = query.transpose(1, 2)
        return tree_attention(query, keys, values, view.words, view.length, block.scale, view.dense).flatten(2)


class _Block:
    """One block's layers, those that read the same input joined."""

    def __init__(self, block: Any):
        attention, mlp = block.self_attn, block.mlp
        self.qkv = Joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = Joined(mlp.gate_proj, mlp.up_proj)
        self.out, self.down, self.scale = attention.o_proj, mlp.down_proj, attention.scaling
        self.before, self.between = block.input_layernorm, block.post_attention_layernorm
        self.query_norm, self.key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)


def _norm(norm: Any, x: Tensor) -> Tensor:
    """As transformers does it: in float32, whatever the model's type, but for the weight."""
    shape = (x.shape[-1],)
    if x.dtype == torch.float32:
        return F.rms_norm(x, shape, norm.weight, norm.variance_epsilon)
    return norm.weight * F.rms_norm(x.float(), shape, None, norm.variance_epsilon).to(x.dtype)
