"""Dialogues as training reads them: several laid end to end in one row, each blind to the others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specresearch.training import dataset
from specresearch.training.dataset import Dialogue
from specresearch.types import Tap, UserError


@dataclass(frozen=True)
class Pack:
    """T tokens of some dialogues. A place is where a token stands in the pack."""

    tokens: Tensor  # [T]
    features: Tensor  # [T, F] the target's; zero at each dialogue's last token, which it never read
    dialogue: Tensor  # [T] number within the pack
    position: Tensor  # [T] place in the dialogue
    left: Tensor  # [T] tokens behind this one in its dialogue
    chosen: Tensor  # [T] bool: the target chose this token itself
    answer: Tensor  # [T] bool: part of an answer
    greedy: Tensor  # [T] bool: part of an answer at temperature 0

    def to(self, device: torch.device, dtype: torch.dtype) -> Pack:
        moved = {name: value.to(device) for name, value in vars(self).items()}
        return Pack(**(moved | {"features": moved["features"].to(dtype)}))


@dataclass(frozen=True)
class Item:
    """A dialogue and where its features lie."""

    dialogue: Dialogue
    shard: Path
    begin: int


class Library:
    """The dialogues of a folder by part, features read on demand. `names` = only these shards."""

    def __init__(self, folder: Path, names: Sequence[str] | None = None):
        paths = dataset.shards(folder) if names is None else [folder / name for name in names]
        self.names = [path.name for path in paths]
        self.items = [item for path in paths for item in _items(path)]
        if not self.items:
            raise UserError(f"{folder} holds no dialogues yet: make some with data=self")
        self.taps = _taps(paths[0])
        self.files: dict[Path, object] = {}

    def part(self, held_out: bool) -> list[Item]:
        return [item for item in self.items if item.dialogue.held_out == held_out]

    def answer_tokens(self, held_out: bool) -> int:
        return sum(len(i.dialogue.tokens) - i.dialogue.answer for i in self.part(held_out))

    def features(self, item: Item) -> Tensor:
        path = dataset.features_path(item.shard)
        if path not in self.files:
            self.files[path] = safe_open(path, "pt").get_slice("features")
        return self.files[path][item.begin : item.begin + len(item.dialogue.tokens)]  # type: ignore[index]

    def columns(self, taps: Sequence[Tap], width: int) -> list[int]:
        """Where the features of `taps` stand among those that were kept."""
        if missing := [tap for tap in taps if tap not in self.taps]:
            raise UserError(f"the data keeps features of {self.taps}, and the head reads {missing}: make them anew")
        return [self.taps.index(tap) * width + i for tap in taps for i in range(width)]

    def pack(self, items: Sequence[Item]) -> Pack:
        lengths = [len(i.dialogue.tokens) for i in items]
        position = torch.cat([torch.arange(n) for n in lengths])
        number = torch.repeat_interleave(torch.arange(len(items)), torch.tensor(lengths))
        left = torch.tensor(lengths)[number] - 1 - position
        answer = torch.tensor([i.dialogue.answer for i in items])[number] <= position
        cold = torch.tensor([i.dialogue.temperature == 0 for i in items])[number]
        return Pack(
            torch.tensor([t for i in items for t in i.dialogue.tokens]),
            torch.cat([self.features(i) for i in items]),
            number,
            position,
            left,
            torch.cat([chosen(i.dialogue) for i in items]),
            answer,
            answer & cold,
        )


def chosen(d: Dialogue) -> Tensor:
    """The tokens that the target chose: its part of the user turn, and the answer -> bool [tokens]"""
    place = torch.arange(len(d.tokens))
    return ((place >= d.sampled) & (place < d.turn_end)) | (place >= d.answer)


def grouped(items: Sequence[Item], size: int, chance: random.Random | None = None) -> list[list[Item]]:
    """All items once, shuffled if `chance`, in groups of at least `size` tokens (the last one may be smaller)."""
    order = list(items)
    if chance is not None:
        chance.shuffle(order)
    groups: list[list[Item]] = [[]]
    count = 0
    for item in order:
        groups[-1].append(item)
        count += len(item.dialogue.tokens)
        if count >= size:
            groups.append([])
            count = 0
    return [group for group in groups if group]


def token_counts(items: Sequence[Item], vocab_size: int) -> Tensor:
    """How often the target chose each token -> [V]"""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for item in items:
        counts += torch.bincount(torch.tensor(item.dialogue.tokens)[chosen(item.dialogue)], minlength=vocab_size)
    return counts


def _items(path: Path) -> Iterator[Item]:
    begin = 0
    for d in dataset.read(path).dialogues:
        yield Item(d, path, begin)
        begin += len(d.tokens)


def _taps(path: Path) -> tuple[Tap, ...]:
    features = dataset.features_path(path)
    if not features.exists():
        raise UserError(f"{path} has no features beside it: make them with stage=features")
    with safe_open(features, "pt") as file:
        return tuple(json.loads(file.metadata()["taps"]))
