"""Published forms of draft heads, told apart by their tensors and their config, never by a name; and ours.

Every reader turns (config, tensors) into (our config, our tensor names, notes for the user). What a form leaves open is
either settled by the weights or refused with the override that settles it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from specresearch.models.eagle import FIELDS as EAGLE
from specresearch.models.eagle import EagleConfig
from specresearch.models.formats.common import (
    SMALL_LM,
    Change,
    Described,
    Tensors,
    changed,
    inside,
    require_finite,
    require_matrices,
)
from specresearch.models.formats.eagle import eagle1, eagle3, speculators
from specresearch.models.formats.medusa import LEGACY, VLLM, from_vllm, medusa
from specresearch.models.medusa import FIELDS as MEDUSA
from specresearch.models.medusa import MedusaConfig
from specresearch.ranges import require
from specresearch.types import UserError

OWN = "specresearch"


def describe(config: Mapping[str, Any], tensors: Tensors, layers: int, change: Change) -> Described:
    """Recognise and translate. `layers` = the target's blocks; `change` = fields of our config that the user sets himself.

    Raises UserError for a form or a variant that is not supported, by name.
    """
    names = set(tensors)
    require(change or {}, {**MEDUSA, **EAGLE}, "drafter.config: ")
    if config.get("format") == SMALL_LM:
        raise UserError("this is a distilled small LM, no draft head: use it with drafter=small_lm drafter.id=FOLDER")
    require_matrices(tensors)
    require_finite(tensors)
    if config.get("format") == OWN:
        return _own(config, tensors, change)
    if "speculators_model_type" in config:
        return speculators(config, tensors, layers, change)
    if any(name.startswith(("model.", "transformer.")) for name in names):
        raise UserError(
            "this is a whole model, not a head (a merged Medusa-2 model changes its target too): load it as a target, "
            "or give a folder that holds the heads alone"
        )
    if any(n.startswith("midlayer.") for n in names) or "layers.0.hidden_norm.weight" in names:
        return eagle3(config, tensors, layers, change)
    if "fc.weight" in names and any(n.startswith("layers.0.") for n in names):
        return eagle1(config, tensors, change)
    plain = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in tensors.items()}
    if plain and all(LEGACY.fullmatch(name) for name in plain):
        return medusa(config, plain, "Medusa", change)
    if any(VLLM.fullmatch(name) for name in plain):
        return medusa(config, from_vllm(config, plain), "Medusa (vLLM form)", change)
    raise UserError(
        "no form of draft head that is known (EAGLE, EAGLE-3, SGLang, speculators, Medusa); "
        f"its tensors are {', '.join(sorted(names)[:6])}"
    )


def to_json(config: EagleConfig | MedusaConfig) -> dict[str, Any]:
    """Our config as it stands in our own config.json."""
    return {"format": OWN, "kind": "eagle" if isinstance(config, EagleConfig) else "medusa", **asdict(config)}


def _own(config: Mapping[str, Any], tensors: Tensors, change: Change) -> Described:
    kinds: dict[str, Any] = {"eagle": EagleConfig, "medusa": MedusaConfig}
    kind = kinds.get(str(config.get("kind")))
    if kind is None:
        raise UserError(f"config.json has kind={config.get('kind')!r}: eagle and medusa are known")
    known = {f.name for f in fields(kind)}
    given = {k: v for k, v in config.items() if k in known}
    odd = set(config) - known - {"format", "kind", "training"}
    if odd:
        raise UserError(f"config.json has unknown keys: {', '.join(sorted(odd))}")
    try:
        own = kind(**given)
    except TypeError as error:
        raise UserError(f"config.json is not complete: {error}") from None
    named = {inside(name): tensor for name, tensor in tensors.items()}
    return Described(OWN, changed(own, change), named)
