"""EAGLE's published forms: SafeAILab's (EAGLE-1, -2 and -3), SpecForge's and SGLang's, and speculators'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specresearch.models.eagle import SHARED, EagleConfig
from specresearch.models.formats.common import Change, Described, Tensors, changed, inside
from specresearch.types import UserError


def _named(tensors: Tensors) -> Tensors:
    deeper = sorted(n for n in tensors if re.match(r"(mid)?layers\.[1-9]", n))
    if deeper:
        raise UserError(f"a head of several layers ({deeper[0]}, ...) is not supported: one layer is")
    if any(".q_norm." in n or ".k_norm." in n for n in tensors):
        raise UserError("a head with q_norm and k_norm (Qwen3's attention) is not supported")
    return {inside(n): t for n, t in tensors.items() if not n.endswith("rotary_emb.inv_freq")}


def eagle1(config: Mapping[str, Any], tensors: Tensors, change: Change) -> Described:
    named = _named(tensors)
    own = EagleConfig(
        version=1,
        **_layer(config, named, change),
        draft_vocab_size=int(_key(config, "vocab_size")),
        target_hidden_size=int(_key(config, "hidden_size")),
        taps=("norm",),
        bias=bool(config.get("bias", True)),
        from_target=tuple(name for name in SHARED if name not in named),
    )
    return Described("SafeAILab EAGLE-1/2", changed(own, change), named, ["feature: after the target's final norm"])


def eagle3(config: Mapping[str, Any], tensors: Tensors, layers: int, change: Change) -> Described:
    """SafeAILab's, SpecForge's and SGLang's flat config; ids of layers, if any, count as SGLang counts them."""
    nested = config.get("eagle_config") or {}
    flags = {**config, **nested}
    if flags.get("use_aux_hidden_state") is False:
        raise UserError("an EAGLE-3 head with use_aux_hidden_state=false is not supported")
    if flags.get("norm_output") and "norm_output" not in (change or {}):
        raise UserError(
            "norm_output=true means two things in this form (SGLang feeds the normed state back, SpecForge trains with "
            "the state itself): say which with 'drafter.config={norm_output: true}' or false"
        )
    given = config.get("eagle_aux_hidden_state_layer_ids")
    if given is not None and "taps" not in (change or {}):
        raise UserError(
            f"eagle_aux_hidden_state_layer_ids={given} stands outside eagle_config, where it is not said whether layers "
            "count from 0 or 1: give the residual streams, e.g. 'drafter.config={taps: [2, 16, 29]}' = after 2, 16, 29 blocks"
        )
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    taps = [int(i) + 1 for i in ids] if ids else None
    how = f"SGLang layer ids {ids}, one less than boundaries" if ids else "the default"
    return _third("EAGLE-3 (SafeAILab, SGLang)", config, flags, tensors, taps, how, layers, change)


def speculators(config: Mapping[str, Any], tensors: Tensors, layers: int, change: Change) -> Described:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise UserError(f"speculators_model_type={kind} is not supported: eagle3 is")
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise UserError("config.json lacks transformer_layer_config")
    if "norm_before_residual" not in {**config, **(change or {})}:
        raise UserError(
            "config.json lacks norm_before_residual, whose absence means false to speculators and true to vLLM: say which "
            "with 'drafter.config={norm_before_residual: true}' or false"
        )
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    taps = [int(i) for i in ids] if ids else None
    how = f"speculators' ids {ids}, which are boundaries" if ids else "the default"
    flat = {**inner, "draft_vocab_size": config.get("draft_vocab_size"), "tie_word_embeddings": False}
    flat |= {"target_hidden_size": config.get("target_hidden_size")}
    return _third("EAGLE-3 (speculators)", flat, config, tensors, taps, how, layers, change)


def _third(
    form: str,
    config: Mapping[str, Any],
    flags: Mapping[str, Any],
    tensors: Tensors,
    taps: list[int] | None,
    how: str,
    layers: int,
    change: Change,
) -> Described:
    named = _named(tensors)
    layer = _layer(config, named, change)
    width = int(config.get("target_hidden_size") or layer["hidden_size"])
    count = named["fc.weight"].shape[1] / width if "fc.weight" in named else 3
    taps = list((change or {}).get("taps") or taps or [2, layers // 2, layers - 3])
    if count != len(taps):
        raise UserError(
            f"fc.weight reads {count:g} features of width {width} and there are {len(taps)} taps ({how}): {taps}; "
            "give them as 'drafter.config={taps: [...]}', k = the residual stream after k blocks"
        )
    draft = int(config.get("draft_vocab_size") or layer["vocab_size"])
    own = draft == layer["vocab_size"]
    if config.get("tie_word_embeddings") and "lm_head.weight" not in named:
        raise UserError("a head whose lm_head is tied to its embeddings (tie_word_embeddings) is not supported")
    lent = tuple(name for name in (SHARED if own else SHARED[:1]) if name not in named)
    if own and "vocabulary.d2t" in named and not bool(named["vocabulary.d2t"].any()):
        del named["vocabulary.d2t"]  # offsets of 0: the whole vocabulary, said at length
    head = EagleConfig(
        version=3,
        **layer,
        draft_vocab_size=draft,
        target_hidden_size=width,
        taps=tuple(taps),
        bias="fc.bias" in named,
        norm_before_residual=bool(flags.get("norm_before_residual", False)),
        norm_before_fc=bool(flags.get("norm_before_fc", False)),
        fc_norm=bool(flags.get("fc_norm") or flags.get("use_aux_norm")),
        norm_output=bool(flags.get("norm_output", False)),
        from_target=lent,
    )
    streams = f"features: residual streams after {', '.join(map(str, taps))} of {layers} blocks ({how})"
    return Described(form, changed(head, change), named, [streams])


def _layer(config: Mapping[str, Any], named: Tensors, change: Change) -> dict[str, Any]:
    """What all EAGLE configs share. The width of a head is not read from the config, since official code ignores it there."""
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UserError(f"hidden_act={act} is not supported: silu is")
    heads, query = int(_key(config, "num_attention_heads")), named.get("midlayer.self_attn.q_proj.weight")
    width = int(_key(config, "hidden_size"))
    theta, scaling = _rope(config, change or {})
    types = config.get("layer_types") or ()
    window = config.get("sliding_window") if "sliding_attention" in types else None
    return {
        "hidden_size": width,
        "intermediate_size": int(_key(config, "intermediate_size")),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": (query.shape[0] if query is not None else width) // heads,
        "vocab_size": int(_key(config, "vocab_size")),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "context": int(config.get("max_position_embeddings", 2048)),
        "qkv_bias": bool(config.get("qkv_bias") or config.get("attention_bias")),
        "window": int(window) if window else None,
    }


def _rope(config: Mapping[str, Any], change: Mapping[str, Any]) -> tuple[float, Change]:
    """transformers 5 writes rope_parameters, everything older rope_theta and rope_scaling; without any the base is 10000."""
    new = config.get("rope_parameters") or {}
    old = {k: config[k] for k in ("rope_theta",) if config.get(k) is not None}
    both = "rope_theta" in new and old and "rope_theta" not in change
    if both and float(new["rope_theta"]) != float(old["rope_theta"]):
        raise UserError(
            f"config.json has rope_theta={old['rope_theta']} and rope_parameters with {new['rope_theta']}: "
            "say which with 'drafter.config={rope_theta: ...}'"
        )
    scaling = config.get("rope_scaling") or {k: v for k, v in new.items() if k != "rope_theta"} or None
    if scaling and scaling.get("rope_type", scaling.get("type")) in (None, "default"):
        scaling = None
    return float({**new, **old}.get("rope_theta", 10000.0)), scaling


def _key(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise UserError(f"config.json lacks {key}")
    return config[key]
