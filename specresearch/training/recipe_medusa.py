"""Medusa-1 (Cai et al., arXiv:2401.10774): heads on a frozen target, taught by its laws; the vocabulary matrix is its."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specresearch.kernels.sampling import raise_half
from specresearch.models.checkpoints import save_head
from specresearch.models.hf import HFModel
from specresearch.models.medusa import MedusaConfig, MedusaHeads
from specresearch.training.eagle3 import Teacher
from specresearch.training.held_out import Guess, Tally
from specresearch.training.packs import Item, Library, Pack, grouped
from specresearch.training.start import draft_tokens


class Medusa:
    """Head k at place t learns the target's law after token t+1+k. Only the residual blocks are trained."""

    def __init__(
        self,
        target: HFModel,
        library: Library,
        *,
        heads: int,
        layers: int,
        decay: float,
        draft_vocab: int,
        name: str = "medusa",
    ):
        self.target, self.decay, self.steps = target, decay, heads
        width = target.head.in_features
        size = min(draft_vocab, target.vocab_size)
        config = MedusaConfig(heads, layers, width, target.vocab_size, size, tied=True, from_target=("lm_head.weight",))
        self.normed = library.columns(("norm",), width)
        self.module = MedusaHeads(config).to(device=target.device, dtype=target.dtype)
        self.module.vocabulary.keep(draft_tokens(target, library, size).to(target.device))
        self.module.adopt(target.model.get_input_embeddings().weight, target.head.weight)

    def loss(self, pack: Pack, dice: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        vocabulary, normed = self.module.vocabulary, pack.features[:, self.normed]
        teacher = Teacher.of(pack, normed, self.target.head.weight.detach()[vocabulary.kept], vocabulary.t2d)
        each = []
        for k, blocks in enumerate(self.module.blocks):
            places, row = places_of(pack, teacher, k)
            each.append(F.cross_entropy(raise_half(self.module.lm_head(blocks(normed[places]))), teacher.p[row]))
        total = torch.stack([self.decay**k * ce for k, ce in enumerate(each)]).sum()
        return total, {f"train/head_{k + 1}": float(ce.detach()) for k, ce in enumerate(each)}

    @torch.no_grad()
    def evaluate(self, library: Library, items: list[Item]) -> dict[str, float]:
        tally = Tally(self.steps)
        for group in grouped(items, 1500):
            pack = library.pack(group).to(self.target.device, self.target.dtype)
            tally.add(pack, group, self._guesses(pack))
        return tally.numbers()

    def _guesses(self, pack: Pack) -> Iterator[Guess]:
        normed, kept = pack.features[:, self.normed], self.module.vocabulary.kept
        for k, blocks in enumerate(self.module.blocks):
            places = ((pack.left >= 2 + k) & pack.greedy.roll(-2 - k)).nonzero()[:, 0]
            yield k, places, kept[self.module.lm_head(blocks(normed[places])).topk(4, -1).indices]

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        head = MedusaHeads(self.module.config)
        head.load_state_dict(self.module.state_dict())
        save_head(head.to(torch.bfloat16), folder, training)


def places_of(pack: Pack, teacher: Teacher, k: int) -> tuple[Tensor, Tensor]:
    """Places t [R] in whose dialogue the target chose token t+2+k, and the rows [R] of the law it chose by."""
    row = teacher.row.roll(-1 - k)
    places = ((pack.left >= 2 + k) & (row >= 0)).nonzero()[:, 0]
    return places, row[places]
