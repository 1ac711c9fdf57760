"""The forward of Llama-like models in few operators. What a pass of a few rows costs on a CPU beyond reading the weights is
mostly calls: from Python, each takes longer than what it computes. So the blocks are one TorchScript function there.

Without this file the adapter goes through transformers' own forward, which stays the reference of every check.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specresearch.kernels import cpu
from specresearch.kernels.attention import folds, on_torch, tree_attention
from specresearch.models.cache import SlotCache
from specresearch.models.eagle import EagleHead
from specresearch.models.linear import product, states
from specresearch.types import Tap

FAMILY = ("llama", "mistral", "qwen2", "qwen3")  # config.model_type: one block, with or without biases and head norms


class View(NamedTuple):
    """What the nodes of a pass see, as `kernels.attention.tree_attention` takes it."""

    words: Tensor | None
    length: Tensor
    dense: Tensor | None


class FastForward:
    """Reads the weights of a model of the family where they are, or packed once for few rows; keeps no other state."""

    def __init__(self, model: Any, blocks: Any, head: nn.Module):
        base, config = model.base_model, model.config
        self.embed, self.final, self.head, self.rotary = base.embed_tokens, base.norm, head, base.rotary_emb
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.theirs = blocks
        first = blocks[0].self_attn  # a rank may have some of the heads
        self.sizes = first.q_proj.out_features // width, first.k_proj.out_features // width, width
        self.eps = float(base.norm.variance_epsilon)
        self.seen = list[Any]()
        self.norm: Any = None
        self.stack: Any = None
        self.script: Any = None

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
        half = self.sizes[2] // 2
        turn = turned(cos[..., :half], sin[..., :half])
        where, rows, slots = cache.targets()
        stack = self.script if view.dense is not None else self.stack
        streams = stack(x, *turn, where, *slots, rows, view.words, view.length, view.dense)
        kept: dict[Tap, Tensor] = dict(enumerate(streams))
        kept["norm"] = self.norm(streams[-1])
        features = torch.cat([kept[tap] for tap in taps], -1) if taps else None
        asked = (
            kept["norm"] if keep is None else kept["norm"][torch.arange(len(keep), device=keep.device), keep][:, None]
        )
        return self.head(asked), features

    def follow(self) -> None:
        """Lay the blocks out where a weight has changed; before the first pass, and whenever an answer begins. (To look at
        every weight takes milliseconds.)"""
        now = [each for part in (self.theirs, self.embed, self.final, self.head) for each in states(part)]
        if now != self.seen:
            self.seen = now
            self.norm = norm_of(self.final.weight, self.eps)
            self.stack = Stack(Block.of(b, *self.sizes, b.self_attn.scaling, self.eps) for b in self.theirs)
            self.script = scripted(self.stack)


class FastEagle:
    """`EagleHead.forward` for drafting, by the same function: a layer that reads two inputs."""

    def __init__(self, head: EagleHead):
        self.head, self.seen = head, list[Any]()
        self.block: Any = None

    def __call__(self, tokens: Tensor, state: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """As the head's own: `mask` [B or 1, T, S] bool over the slots that `cache` shows."""
        head, c, layer = self.head, self.head.config, self.head.midlayer
        embedded = head.embed_tokens(tokens)
        if c.version == 3:
            normed = layer.hidden_norm(state)
            inputs = torch.cat([layer.input_layernorm(embedded), normed], -1)
            state = normed if c.norm_before_residual else state
        else:
            inputs = state = head.fc(torch.cat([embedded, state], -1))
        angles = positions[..., None] * self.frequencies
        turn = turned(angles.cos().to(state.dtype), angles.sin().to(state.dtype))
        dense = torch.zeros(mask.shape, dtype=state.dtype, device=state.device).masked_fill_(~mask, -torch.inf)
        where, rows, slots = cache.targets()
        state = self.block(inputs, state, *turn, where, *(x[0] for x in slots), rows, None, positions, dense[:, None])
        return head.norm(state) if c.norm_output else state

    def follow(self) -> None:
        """As `FastForward`'s."""
        layer, c = self.head.midlayer, self.head.config
        now = states(self.head)
        if now != self.seen:
            self.frequencies = layer.self_attn.frequencies.to(self.head.fc.weight.device)
            block = Block.of(layer, c.num_heads, c.num_kv_heads, c.head_dim, c.head_dim**-0.5, c.rms_norm_eps, True)
            self.block, self.seen = scripted(block), now


class Block(nn.Module):
    """One block of the family; layers that read the same input are one product."""

    if TYPE_CHECKING:  # TorchScript would read these, and knows no `|`
        heads: int
        shared: int  # heads of K and V
        width: int
        scale: float
        before: nn.Module
        between: nn.Module
        query_norm: nn.Module | None
        key_norm: nn.Module | None

    def __init__(self, qkv: nn.Module, out: nn.Module, gate_up: nn.Module, down: nn.Module):
        super().__init__()
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down

    @staticmethod
    def of(block: Any, heads: int, shared: int, width: int, scale: float, eps: float, eagle: bool = False) -> Block:
        """From a layer with the names of the family. EAGLE's reads what is normed already, and norms in its own type."""
        attention, mlp = block.self_attn, block.mlp
        own = Block(
            product(attention.q_proj, attention.k_proj, attention.v_proj),
            product(attention.o_proj),
            product(mlp.gate_proj, mlp.up_proj),
            product(mlp.down_proj),
        )
        own.heads, own.shared, own.width, own.scale = heads, shared, width, scale
        own.before = nn.Identity() if eagle else norm_of(block.input_layernorm.weight, eps)
        own.between = norm_of(block.post_attention_layernorm.weight, eps, raised=not eagle)
        norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        own.query_norm, own.key_norm = (None if n is None else norm_of(n.weight, eps, raised=not eagle) for n in norms)
        return own

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        where: Tensor,
        keys: Tensor,
        values: Tensor,
        seen_keys: Tensor,
        seen_values: Tensor,
        rows: Tensor | None,
        words: Tensor | None,
        length: Tensor,
        dense: Tensor | None,
    ) -> Tensor:
        """What is read [R, q, in] and the stream [R, q, H] -> the stream [R, q, H]. `keys` and `values` [heads, slots, width]
        take K and V at slots `where` [R * q]; `seen_keys` and `seen_values` [B, heads, S, width] are what the rows then
        show, or those of them that `rows` [R] names."""
        mixed = self.qkv(self.before(x)).unflatten(-1, [-1, self.width])
        both = self.heads + self.shared
        pair = mixed[:, :, :both]  # of [R, q, heads, width]
        if self.query_norm is not None and self.key_norm is not None:
            pair = torch.cat([self.query_norm(pair[:, :, : self.heads]), self.key_norm(pair[:, :, self.heads :])], 2)
        pair = pair * cos + pair.roll(self.width // 2, -1) * sin  # rounds as transformers' own
        keys.index_copy_(1, where, pair[:, :, self.heads :].flatten(0, 1).transpose(0, 1))
        values.index_copy_(1, where, mixed[:, :, both:].flatten(0, 1).transpose(0, 1))
        if rows is not None:
            seen_keys, seen_values = seen_keys.index_select(0, rows), seen_values.index_select(0, rows)
        query = pair[:, :, : self.heads].transpose(1, 2)
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            assert dense is not None
            attended = on_torch(query, seen_keys, seen_values, dense, self.scale, folds(query))
        else:
            attended = tree_attention(query, seen_keys, seen_values, words, length, self.scale, dense)
        x = residual + self.out(attended.flatten(2))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Stack(nn.Module):
    """The blocks, one after the other."""

    def __init__(self, blocks: Iterable[Block]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        where: Tensor,
        keys: Tensor,
        values: Tensor,
        seen_keys: Tensor,
        seen_values: Tensor,
        rows: Tensor | None,
        words: Tensor | None,
        length: Tensor,
        dense: Tensor | None,
    ) -> list[Tensor]:
        """As a block, K and V being those of all layers -> the stream before the first block and after each of them."""
        streams = [x]
        for i, block in enumerate(self.blocks):
            own = keys[i], values[i], seen_keys[i], seen_values[i]
            x = block(x, x, cos, sin, where, *own, rows, words, length, dense)
            streams.append(x)
        return streams


def turned(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Of half the width [R, q, width / 2] -> what multiplies x, and what multiplies x rolled by half [R, q, 1, width]"""
    return torch.cat([cos, cos], -1)[:, :, None], torch.cat([-sin, sin], -1)[:, :, None]


def norm_of(weight: Tensor, eps: float, raised: bool = True) -> nn.Module:
    """RMSNorm as transformers does it: in float32, whatever the model's type, but for the weight; or, not `raised`, all in the
    model's type, as torch does it."""
    if weight.dtype == torch.float32 and weight.device.type == "cpu" and cpu.serves():
        return CompiledNorm(weight, eps)
    return RaisedNorm(weight, eps) if raised else Norm(weight, eps)


class Norm(nn.Module):
    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, [x.shape[-1]], self.weight, self.eps)


class RaisedNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.rms_norm(x.float(), [x.shape[-1]], None, self.eps).to(x.dtype)


class CompiledNorm(Norm):
    """In float32 both are this."""

    def forward(self, x: Tensor) -> Tensor:
        return cpu.rms_norm(x, self.weight, self.eps)


def scripted(module: nn.Module) -> Any:
    """By TorchScript on a CPU: torch calls it deprecated, and has no successor that compiles in no time. As it is elsewhere."""
    if next(module.parameters()).device.type != "cpu":
        return module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return torch.jit.script(module)
        except Exception:  # a torch that has it no longer
            return module
