"""Medusa's published forms: the authors' (legacy and with matrices of their own), and vLLM's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from specresearch.models.formats.common import Change, Described, Tensors, changed
from specresearch.models.medusa import FIELDS, MedusaConfig
from specresearch.ranges import optional, require
from specresearch.types import UserError

LEGACY = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def medusa(config: Mapping[str, Any], plain: Tensors, form: str, change: Change) -> Described:
    """Heads, blocks and vocabulary are counted in the weights: published configs are known to be wrong about them."""
    named, seen, blocks = {}, set(), set()
    for name, tensor in plain.items():
        found = LEGACY.fullmatch(name)
        if found is None:
            named[name] = tensor  # a shared lm_head
            continue
        head, layer, linear, what = found.groups()
        seen.add(int(head))
        if linear:
            blocks.add(int(layer))
        named[f"blocks.{head}.{layer}.linear.{what}" if linear else f"lm_heads.{head}.{what}"] = tensor
    for what, numbers in (("heads", seen), ("blocks", blocks)):
        if numbers != set(range(len(numbers))):
            raise UserError(
                f"the {what} in the weights are numbered {_few(numbers)}: 0, 1, 2, ... are needed, without gaps"
            )
    own = [t for n, t in named.items() if n.startswith(("lm_heads.", "lm_head."))]
    inner = [t for n, t in named.items() if n.startswith("blocks.") and n.endswith(".weight")]
    rows = own[0].shape[0] if own else None
    vocab = rows if "vocabulary.d2t" not in named else None
    vocab = vocab or (change or {}).get("vocab_size") or config.get("vocab_size")
    require({"vocab_size": vocab}, {"vocab_size": optional(FIELDS["vocab_size"])}, "config.json has ")
    if vocab is None:
        raise UserError(
            "heads without a vocabulary matrix: say how large the target's is, 'drafter.config={vocab_size: V}'"
        )
    shared = "lm_head.weight" in named or not own
    made = MedusaConfig(
        heads=len(seen),
        layers=len(blocks),
        hidden_size=(inner or own)[0].shape[1],
        vocab_size=vocab,
        draft_vocab_size=rows or vocab,
        tied=shared,
        block_bias=any(n.startswith("blocks.") and n.endswith(".bias") for n in named),
        from_target=() if own else ("lm_head.weight",),
    )
    said = config.get("medusa_num_heads", config.get("num_heads"))
    notes = [f"{made.heads} heads in the weights"] + (
        [f"the config says {said}"] if said not in (None, made.heads) else []
    )
    return Described(form, changed(made, change), named, [", ".join(notes)])


def from_vllm(config: Mapping[str, Any], plain: Tensors) -> Tensors:
    """vLLM's names -> the legacy ones; with `original_lm_head` the first head's matrix serves all."""
    depth = 1 + max(int(found[2]) for name in plain if (found := VLLM.fullmatch(name)))
    named = {VLLM.sub(r"\1.\2.linear.\3", name): tensor for name, tensor in plain.items()}
    if (kept := named.pop("token_map", None)) is not None:
        size = min(
            [t.shape[0] for n, t in named.items() if n.startswith("lm_head") and len(t) > len(kept)], default=1 << 24
        )
        if kept.dim() != 1 or kept.is_floating_point() or not bool(((kept >= 0) & (kept < size)).all()):
            raise UserError("token_map does not list ids of the target's vocabulary")
        named["vocabulary.d2t"] = kept - torch.arange(len(kept))
        named = {k: t[kept] if k.startswith("lm_head") and len(t) > len(kept) else t for k, t in named.items()}
    if config.get("original_lm_head") and "lm_heads.0.weight" in named:
        named["lm_head.weight"] = named.pop("lm_heads.0.weight")
    return {re.sub(r"^lm_heads\.(\d+)\.weight$", rf"\1.{depth}.weight", name): t for name, t in named.items()}


def _few(numbers: set[int]) -> str:
    some = sorted(numbers)
    return ", ".join(map(str, some[:4])) + (", ..." if len(some) > 4 else "")
