"""Draft heads in straight lines and float64: one position after the other, no cache, no mask, no code of the package."""

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def turn(x: Tensor, position: float, theta: float) -> Tensor:
    """Rotary embedding of one head [width], as a product of complex numbers."""
    half = x.shape[0] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag])


def eagle(w: dict[str, Tensor], c, tokens: list[int], features: Tensor, path: list[int]) -> list[Tensor]:
    """Logits over the draft vocabulary after `tokens` (the root last), then after each token of `path`.

    `w` = the head's tensors with embed_tokens and lm_head, `c` = its config, `features` [len(tokens) - 1, F] the target's.
    """
    w = {name: t.double() for name, t in w.items()}
    factor = c.rope_scaling["factor"] if c.rope_scaling else 1.0  # linear scaling only
    third, keys, values, answers, state = c.version == 3, [], [], [], None
    known = len(features)
    following = [*tokens[1:], *path]
    for at, token in enumerate(following):
        if at < known:
            state = features[at].double()
            if third:
                parts = state.split(c.target_hidden_size)
                if c.fc_norm:
                    parts = [rms(p, w[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, p in enumerate(parts)]
                state = torch.cat(list(parts))
                if c.norm_before_fc:
                    state = rms(state, w["input_norm.weight"], c.rms_norm_eps)
                state = w["fc.weight"] @ state + (w["fc.bias"] if c.bias else 0)
        embedded = w["embed_tokens.weight"][token]
        if third:
            seen = rms(state, w["midlayer.hidden_norm.weight"], c.rms_norm_eps)
            x = torch.cat([rms(embedded, w["midlayer.input_layernorm.weight"], c.rms_norm_eps), seen])
            stream = seen if c.norm_before_residual else state
        else:
            x = stream = w["fc.weight"] @ torch.cat([embedded, state]) + (w["fc.bias"] if c.bias else 0)
        q, k, v = (
            w[f"midlayer.self_attn.{n}_proj.weight"] @ x + (w[f"midlayer.self_attn.{n}_proj.bias"] if c.qkv_bias else 0)
            for n in "qkv"
        )
        position = at / factor
        keys.append([turn(head, position, c.rope_theta) for head in k.split(c.head_dim)])
        values.append(v.split(c.head_dim))
        start = 0 if c.window is None else max(0, at + 1 - c.window)
        heads = []
        for h, query in enumerate(q.split(c.head_dim)):
            group = h // (c.num_heads // c.num_kv_heads)
            query = turn(query, position, c.rope_theta)
            weight = torch.stack([query @ key[group] for key in keys[start:]]) / c.head_dim**0.5
            heads.append(weight.softmax(0) @ torch.stack([value[group] for value in values[start:]]))
        stream = stream + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        y = rms(stream, w["midlayer.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = w["midlayer.mlp.gate_proj.weight"] @ y
        stream = stream + w["midlayer.mlp.down_proj.weight"] @ (
            gate * gate.sigmoid() * (w["midlayer.mlp.up_proj.weight"] @ y)
        )
        normed = rms(stream, w["norm.weight"], c.rms_norm_eps) if third else stream
        state = normed if c.norm_output else stream
        if at >= known - 1:
            answers.append(w["lm_head.weight"] @ normed)
    return answers


def medusa(w: dict[str, Tensor], heads: int, layers: int, feature: Tensor) -> list[Tensor]:
    """Logits of each head over the draft vocabulary from one feature [H]."""
    w, answers = {name: t.double() for name, t in w.items()}, []
    for head in range(heads):
        x = feature.double()
        for layer in range(layers):
            y = w[f"blocks.{head}.{layer}.linear.weight"] @ x + w[f"blocks.{head}.{layer}.linear.bias"]
            x = x + y * y.sigmoid()
        answers.append(w.get("lm_head.weight", w.get(f"lm_heads.{head}.weight")) @ x)
    return answers
