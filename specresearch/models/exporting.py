"""Draft heads in the forms that servers load: SGLang's flat one, and the speculators form that vLLM reads.

Every function gives (config.json, tensors). What a server would ignore in silence is refused. The head must have been
given what it takes from its target; that is written out where the server does not take it from the target itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specresearch.models.eagle import EagleConfig, EagleHead
from specresearch.models.medusa import MedusaHeads
from specresearch.types import UserError

Written = tuple[dict[str, Any], dict[str, Tensor]]


def for_sglang(head: EagleHead | MedusaHeads, blocks: int) -> Written:
    """`blocks` of the target. Raises UserError for what SGLang cannot serve."""
    if isinstance(head, MedusaHeads):
        raise UserError("SGLang serves no Medusa heads: use format=vllm")
    c = head.config
    _refuse("SGLang", c, ("norm_before_residual", "norm_before_fc", "qkv_bias", "window"))
    tensors = _tensors(head, "midlayer." if c.version == 3 else "layers.0.")
    if c.target_hidden_size == c.hidden_size:
        tensors.pop("embed_tokens.weight")  # SGLang puts the target's in any case
    config = _flat(c) | {"architectures": [f"LlamaForCausalLMEagle{'3' if c.version == 3 else ''}"]}
    if c.version == 1:
        tensors.pop("lm_head.weight")
        if not c.bias:  # SGLang's has one, and would leave it as it comes
            tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
        return config | {"bias": True}, tensors
    config |= {"fc_norm": c.fc_norm, "norm_output": c.norm_output, "bias": c.bias}
    config |= {"target_hidden_size": c.target_hidden_size}
    if c.taps != default_taps(blocks):  # the default needs no ids, and ids are read in two ways
        ids = [int(tap) - 1 for tap in c.taps]
        if min(ids) < 0:
            raise UserError(f"SGLang cannot read the embeddings as a feature (taps {list(c.taps)})")
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        config["num_aux_hidden_states"] = len(ids)
    return config, tensors


def for_vllm(head: EagleHead | MedusaHeads, verifier: dict[str, Any], steps: int) -> Written:
    """`verifier` = name_or_path and architectures of the target; `steps` = tokens to draft. Raises UserError."""
    if isinstance(head, MedusaHeads):
        return _medusa(head)
    c = head.config
    _refuse("vLLM", c, ("window",))
    if c.version == 1:
        _refuse("vLLM", c, ("bias", "qkv_bias"))
        config = _flat(c) | {"architectures": ["EagleLlamaForCausalLM"], "bias": False}
        return config, {k: v for k, v in _tensors(head, "layers.0.").items() if k not in ("lm_head.weight",)}
    _refuse("vLLM", c, ("bias",))
    proposal = {"proposal_type": "greedy", "speculative_tokens": steps, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": _flat(c) | {"architectures": ["LlamaForCausalLM"]},
        "draft_vocab_size": c.draft_vocab_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "target_hidden_size": c.target_hidden_size if c.target_hidden_size != c.hidden_size else None,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }
    return config, _tensors(head, "layers.0.")


def default_taps(blocks: int) -> tuple[int, int, int]:
    return (2, blocks // 2, blocks - 3)


def _refuse(server: str, config: EagleConfig, variants: tuple[str, ...]) -> None:
    if odd := [name for name in variants if getattr(config, name)]:
        raise UserError(f"{server} cannot serve a head with {' and '.join(odd)}: it would leave that out in silence")


def _flat(c: EagleConfig) -> dict[str, Any]:
    """A Llama config of one layer. Rotary settings in both spellings: older servers read the one, transformers 5 the other."""
    scaling = dict(c.rope_scaling or {"rope_type": "default"})
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.context,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": c.qkv_bias,
        "rope_theta": c.rope_theta,
        "rope_scaling": c.rope_scaling,
        "rope_parameters": {"rope_theta": c.rope_theta, **scaling},
    }


def _tensors(head: EagleHead, layer: str) -> dict[str, Tensor]:
    state = head.state_dict()
    named = {n.replace("midlayer.", layer): t.clone() for n, t in state.items() if not n.startswith("vocabulary.")}
    if head.vocabulary.reduced:
        named |= {"d2t": head.vocabulary.d2t, "t2d": head.vocabulary.t2d}
    return named


def _medusa(heads: MedusaHeads) -> Written:
    """vLLM's own names; a shared matrix is written once, as the first head's, and `original_lm_head` says so."""
    c, named = heads.config, {}
    for name, tensor in heads.state_dict().items():
        if name.startswith("blocks."):
            _, head, layer, _, what = name.split(".")
            named[f"blocks.{head}.layers.{layer}.{what}"] = tensor
        elif name.startswith("lm_head"):
            named["lm_heads.0.weight" if c.tied else name] = tensor.clone()
    config: dict[str, Any] = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": c.heads}
    config |= {"num_hidden_layers": c.layers, "hidden_size": c.hidden_size, "vocab_size": c.vocab_size}
    config |= {"medusa_fc_bias": c.block_bias, "original_lm_head": c.tied, "truncated_vocab_size": c.draft_vocab_size}
    if heads.vocabulary.reduced:
        named["token_map"] = heads.vocabulary.kept
    return config, named
