"""What all readers of draft heads share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from specresearch.models.eagle import EagleConfig
from specresearch.models.medusa import MedusaConfig
from specresearch.ranges import Rule, require
from specresearch.types import UserError

Tensors = dict[str, Tensor]
SMALL_LM = "specresearch-small-lm"  # `format` of a distilled small LM, which is no head
Change = Mapping[str, Any] | None  # fields of our config that the user sets himself


@dataclass(frozen=True)
class Described:
    """A checkpoint in our terms. `tensors` bear our names; which of them are needed, the config says."""

    format: str
    config: EagleConfig | MedusaConfig
    tensors: Tensors
    notes: list[str] = field(default_factory=list)


def changed(config: Any, change: Change) -> Any:
    """`config` with the user's own values. Raises UserError for a field that does not exist."""
    known = [f.name for f in fields(config)]
    if odd := set(change or {}) - set(known):
        raise UserError(f"drafter.config has no {', '.join(sorted(odd))}: there are {', '.join(known)}")
    return replace(config, **dict(change or {}))


def inside(name: str) -> str:
    """Published name of a tensor of EAGLE's -> ours."""
    if name == "d2t":
        return "vocabulary.d2t"
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def field_of(config: Mapping[str, Any], key: str, rule: Rule, default: Any = None) -> Any:
    """`config[key]`, or `default` where it is absent. Raises UserError for a value that the rule forbids."""
    value = config.get(key, default)
    require({key: value}, {key: rule}, "config.json has ")
    return value


def misfits(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """What is missing, unexpected, misshapen or of another kind of number among the `given` tensors, in words."""
    faults = [f"missing {name} {list(wanted[name].shape)}" for name in sorted(wanted.keys() - given.keys())]
    faults += [f"unexpected {name} {list(given[name].shape)}" for name in sorted(given.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & given.keys()):
        tensor, right = given[name], wanted[name]
        if tensor.shape != right.shape:
            faults.append(f"{name} is {list(tensor.shape)} instead of {list(right.shape)}")
        elif tensor.is_floating_point() != right.is_floating_point():
            kind = "fractions" if right.is_floating_point() else "whole numbers"
            faults.append(f"{name} holds {str(tensor.dtype)[6:]}, and {kind} are needed")
    return faults


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError that names the tensors with NaN or infinite numbers."""
    floats = {n: t.float() if t.element_size() == 1 else t for n, t in tensors.items() if t.is_floating_point()}
    if bad := sorted(name for name, tensor in floats.items() if not bool(tensor.isfinite().all())):
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise UserError(f"NaN or infinite numbers in {', '.join(bad[:4])}{more}: the weights are damaged")


def require_matrices(tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError unless all weights but those of norms are matrices, as in every form of head."""
    for name, tensor in tensors.items():
        flat = "norm" in name or not name.endswith("weight")
        if tensor.dim() == 0 or (tensor.dim() != 2 and not flat):
            raise UserError(f"tensor {name} {list(tensor.shape)} is no {'vector' if flat else 'matrix'}")
