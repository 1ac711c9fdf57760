"""Dialogues on disk: append-only shards of token ids, beside each the target's features if they were kept.

A shard is written whole or not at all, so a job may be killed at any moment and go on from what is there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specresearch.types import Tap, UserError

COLUMNS = ("turn", "sampled", "turn_end", "answer", "temperature", "held_out")


@dataclass
class Dialogue:
    """One user turn and the target's answer."""

    tokens: list[int]
    turn: int  # first token of the user turn
    sampled: int  # first token that the target chose itself
    turn_end: int  # behind the last token that it chose of the user turn
    answer: int  # first token of the answer
    kind: str
    temperature: float  # of the answer
    held_out: bool  # never trained on
    features: Tensor | None = None  # [tokens, F]


@dataclass(frozen=True)
class Shard:
    path: Path
    dialogues: list[Dialogue]

    @property
    def features_path(self) -> Path:
        return features_path(self.path)


def features_path(path: Path) -> Path:
    return path.with_name("features-" + path.name)


def write(
    folder: Path, dialogues: Sequence[Dialogue], vocab_size: int, taps: Sequence[Tap] = (), origin: str | None = None
) -> Path:
    """Append a shard. Features go first, so that a shard that exists is complete. `origin` marks the target (origin.py)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"dialogues-{time.time_ns()}-{os.getpid()}.safetensors"
    if dialogues and all(d.features is not None for d in dialogues):
        joined = torch.cat([d.features for d in dialogues if d.features is not None]).to(torch.bfloat16)
        save(features_path(path), {"features": joined.contiguous()}, {"taps": json.dumps(list(taps))})
    small = torch.uint16 if vocab_size <= 1 << 16 else torch.int32
    tensors = {
        "tokens": torch.tensor([t for d in dialogues for t in d.tokens], dtype=torch.int32).to(small),
        "lengths": torch.tensor([len(d.tokens) for d in dialogues], dtype=torch.int32),
        **{k: torch.tensor([getattr(d, k) for d in dialogues], dtype=torch.int32) for k in COLUMNS[:4]},
        "temperature": torch.tensor([d.temperature for d in dialogues]),
        "held_out": torch.tensor([d.held_out for d in dialogues], dtype=torch.bool),
    }
    save(path, tensors, {"kinds": json.dumps([d.kind for d in dialogues])} | ({"origin": origin} if origin else {}))
    return path


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Whole or not at all."""
    scratch = path.with_suffix(f".tmp{os.getpid()}")
    save_file(tensors, scratch, metadata)
    scratch.replace(path)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("dialogues-*.safetensors"))


def read(path: Path) -> Shard:
    """The dialogues of one shard, without features."""
    try:
        with safe_open(path, "pt") as file:
            kinds = json.loads(file.metadata()["kinds"])
        t = load_file(path)
        tokens, ends = t["tokens"].long().tolist(), t["lengths"].cumsum(0).tolist()
        columns: list[list[Any]] = [t[k].tolist() for k in COLUMNS]
    except Exception as error:  # a damaged file raises many kinds
        raise UserError(f"{path} is no shard of dialogues ({' '.join(str(error).split())[:80]}): delete it") from None
    rows = zip([0, *ends[:-1]], ends, kinds, *columns)
    return Shard(path, [Dialogue(tokens[b:e], u, s, v, a, k, h, o) for b, e, k, u, s, v, a, h, o in rows])


def read_all(folder: Path) -> Iterator[Dialogue]:
    for path in shards(folder):
        yield from read(path).dialogues
