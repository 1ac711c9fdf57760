"""Which target wrote a shard of dialogues: another one's answers would teach the wrong law."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specresearch.models.hf import HFModel
from specresearch.training import dataset
from specresearch.types import UserError

TENSORS, EACH = 64, 4  # weights of each of so many tensors are kept
ROUNDING = 4e-3  # between float32, and half precision rounded to bfloat16; other weights differ by more somewhere
SHIPPED = Path(__file__).resolve().parents[1] / "checkpoints"  # dialogues that come with the package bear no mark


@dataclass(frozen=True)
class Origin:
    """A target's name and some of its weights, which tell it from others in whatever precision it is loaded.

    `Target.fingerprint` would refuse the same target on another device.
    """

    name: str
    weights: list[float]

    @classmethod
    @torch.no_grad()
    def of(cls, target: HFModel) -> Origin:
        named = sorted((n, p) for n, p in target.model.named_parameters() if not p.is_meta)
        found = []
        for _, weight in named[:: max(1, len(named) // TENSORS)]:
            flat = weight.detach().flatten()
            found += flat[:: max(1, len(flat) // EACH)][:EACH].float().tolist()
        return cls(target.name, found)

    def is_of(self, target: HFModel) -> bool:
        ours, theirs = (torch.tensor(origin.weights) for origin in (self, Origin.of(target)))
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=ROUNDING, atol=1e-6)


def read(path: Path) -> Origin | None:
    """The mark of a shard. Raises UserError if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            mark: Any = (file.metadata() or {}).get("origin")
        return None if mark is None else Origin(**json.loads(mark))
    except Exception as error:  # a damaged file raises many kinds
        raise UserError(f"{path} is no shard of dialogues ({' '.join(str(error).split())[:80]}): delete it") from None


def mark(origin: Origin) -> str:
    return json.dumps(asdict(origin))


def require(target: HFModel, folder: Path) -> None:
    """Raises UserError for dialogues of another target. For those without a mark, unless they are shipped, a warning."""
    known = SHIPPED / target.name / "data"
    for path in dataset.shards(folder):
        origin = read(path)
        if origin is None and not (known / path.name).exists():
            print(f"warning: {path} does not say which target wrote it: {target.name} is taken for it", file=sys.stderr)
        elif origin is not None and not origin.is_of(target):
            raise UserError(
                f"{path} was written by a model called {origin.name} whose weights are not those of {target.name}: "
                "give this target a folder of its own, data.folder=FOLDER"
            )
