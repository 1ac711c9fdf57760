"""EAGLE's published forms: SafeAILab's (EAGLE-1, -2 and -3), SpecForge's and SGLang's, and speculators'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specresearch.models.eagle import FIELDS, SHARED, EagleConfig
from specresearch.models.formats.common import Change, Described, Tensors, changed, field_of, inside
from specresearch.ranges import FLAG, MAPPING, Rule, optional, require, several, whole
from specresearch.types import UserError

SIZE = FIELDS["hidden_size"]
IDS = Rule(lambda v: v is None or v == [] or several(whole(0), "").holds(v), "a list of layers")
NAMES = several(Rule(lambda v: isinstance(v, str), ""), "names")


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
        draft_vocab_size=_key(config, "vocab_size"),
        target_hidden_size=_key(config, "hidden_size"),
        taps=("norm",),
        bias=field_of(config, "bias", FLAG, True),
        from_target=tuple(name for name in SHARED if name not in named),
    )
    return Described("SafeAILab EAGLE-1/2", changed(own, change), named, ["feature: after the target's final norm"])


def eagle3(config: Mapping[str, Any], tensors: Tensors, layers: int, change: Change) -> Described:
    """SafeAILab's, SpecForge's and SGLang's flat config; ids of layers, if any, count as SGLang counts them."""
    nested = field_of(config, "eagle_config", optional(MAPPING)) or {}
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
    ids = field_of(nested, "eagle_aux_hidden_state_layer_ids", IDS)
    taps = [i + 1 for i in ids] if ids else None
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
    ids = field_of(config, "eagle_aux_hidden_state_layer_ids", IDS)
    taps = list(ids) if ids else None
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
    width = field_of(config, "target_hidden_size", optional(SIZE)) or layer["hidden_size"]
    count = named["fc.weight"].shape[1] / width if "fc.weight" in named else 3
    taps = list((change or {}).get("taps") or taps or [2, layers // 2, layers - 3])
    if count != len(taps):
        raise UserError(
            f"fc.weight reads {count:g} features of width {width} and there are {len(taps)} taps ({how}): {taps}; "
            "give them as 'drafter.config={taps: [...]}', k = the residual stream after k blocks"
        )
    draft = field_of(config, "draft_vocab_size", optional(SIZE)) or layer["vocab_size"]
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
        norm_before_residual=_flag(flags, "norm_before_residual"),
        norm_before_fc=_flag(flags, "norm_before_fc"),
        fc_norm=_flag(flags, "fc_norm", "use_aux_norm"),
        norm_output=_flag(flags, "norm_output"),
        from_target=lent,
    )
    streams = f"features: residual streams after {', '.join(map(str, taps))} of {layers} blocks ({how})"
    return Described(form, changed(head, change), named, [streams])


def _layer(config: Mapping[str, Any], named: Tensors, change: Change) -> dict[str, Any]:
    """What all EAGLE configs share. The width of a head is not read from the config, since official code ignores it there."""
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UserError(f"hidden_act={act} is not supported: silu is")
    heads, query = _key(config, "num_attention_heads"), named.get("midlayer.self_attn.q_proj.weight")
    width = _key(config, "hidden_size")
    theta, scaling = _rope(config, change or {})
    window = field_of(config, "sliding_window", optional(whole()))
    return {
        "hidden_size": width,
        "intermediate_size": _key(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": field_of(config, "num_key_value_heads", optional(SIZE)) or heads,
        "head_dim": (query.shape[0] if query is not None else width) // heads,
        "vocab_size": _key(config, "vocab_size"),
        "rms_norm_eps": float(field_of(config, "rms_norm_eps", FIELDS["rms_norm_eps"], 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "context": field_of(config, "max_position_embeddings", FIELDS["context"], 2048),
        "qkv_bias": _flag(config, "qkv_bias", "attention_bias"),
        "window": window if "sliding_attention" in (field_of(config, "layer_types", optional(NAMES)) or ()) else None,
    }


def _rope(config: Mapping[str, Any], change: Mapping[str, Any]) -> tuple[float, Change]:
    """transformers 5 writes rope_parameters, everything older rope_theta and rope_scaling; without any the base is 10000."""
    new = field_of(config, "rope_parameters", optional(MAPPING)) or {}
    old = {k: config[k] for k in ("rope_theta",) if config.get(k) is not None}
    for place in (new, old):
        require(place, {"rope_theta": FIELDS["rope_theta"]}, "config.json has ")
    both = "rope_theta" in new and old and "rope_theta" not in change
    if both and float(new["rope_theta"]) != float(old["rope_theta"]):
        raise UserError(
            f"config.json has rope_theta={old['rope_theta']} and rope_parameters with {new['rope_theta']}: "
            "say which with 'drafter.config={rope_theta: ...}'"
        )
    scaling = (
        field_of(config, "rope_scaling", optional(MAPPING))
        or {k: v for k, v in new.items() if k != "rope_theta"}
        or None
    )
    if scaling and scaling.get("rope_type", scaling.get("type")) in (None, "default"):
        scaling = None
    return float({**new, **old}.get("rope_theta", 10000.0)), scaling


def _key(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise UserError(f"config.json lacks {key}")
    return int(field_of(config, key, SIZE))


def _flag(config: Mapping[str, Any], *keys: str) -> bool:
    """Whether one of them is set; all are looked at."""
    values = [field_of(config, key, optional(FLAG)) for key in keys]
    return any(values)
