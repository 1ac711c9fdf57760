"""What all readers of draft heads share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from specresearch.models.eagle import EagleConfig
from specresearch.models.medusa import MedusaConfig
from specresearch.types import UserError

Tensors = dict[str, Tensor]
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


def misfits(given: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> list[str]:
    """What is missing, unexpected or misshapen among the `given` tensors, in words."""
    faults = [f"missing {name} {list(wanted[name])}" for name in sorted(wanted.keys() - given.keys())]
    faults += [f"unexpected {name} {list(given[name].shape)}" for name in sorted(given.keys() - wanted.keys())]
    return faults + [
        f"{name} is {list(given[name].shape)} instead of {list(wanted[name])}"
        for name in sorted(wanted.keys() & given.keys())
        if given[name].shape != wanted[name]
    ]
