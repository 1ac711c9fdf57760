"""A small LM by distillation: some of the target's own layers learn its law; its embedding and vocabulary matrix stay.

The law is compared, and later drafted, on the most frequent tokens alone: with 3 layers of SmolLM2 the whole vocabulary
matrix (49152 x 576) would cost nearly three times as much as the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specresearch.kernels.sampling import raise_half
from specresearch.models.distilled import save_student, student
from specresearch.models.hf import HFModel
from specresearch.training.eagle3 import Teacher
from specresearch.training.held_out import Guess, Tally
from specresearch.training.packs import Item, Library, Pack, grouped
from specresearch.training.start import draft_tokens


class SmallLM:
    """KL to the target's law at every token that the target chose."""

    def __init__(
        self,
        target: HFModel,
        library: Library,
        *,
        layers: Sequence[int],
        draft_vocab: int,
        steps: int,
        name: str = "small_lm",
    ):
        self.target, self.layers, self.steps = target, list(layers), steps
        kept = draft_tokens(target, library, min(draft_vocab, target.vocab_size))
        self.module = student(target, self.layers, kept)
        self.normed = library.columns(("norm",), target.head.in_features)

    def hidden(self, pack: Pack) -> Tensor:
        """The student's output before the vocabulary matrix -> [T, H]"""
        seen = (pack.dialogue[:, None] == pack.dialogue) & (pack.position[:, None] >= pack.position)
        mask = torch.zeros(seen.shape, dtype=self.target.dtype, device=seen.device)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        ids, positions = pack.tokens[None], pack.position[None]
        output = self.module.base_model(
            input_ids=ids, attention_mask=mask[None, None], position_ids=positions, use_cache=False
        )
        return output.last_hidden_state[0]

    def loss(self, pack: Pack, dice: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        vocabulary, matrix = self.module.vocabulary, self.module.get_output_embeddings().weight
        teacher = Teacher.of(pack, pack.features[:, self.normed], matrix, vocabulary.t2d)
        places, p = (teacher.row >= 0).nonzero()[:, 0], teacher.p
        loss = F.cross_entropy(raise_half(self.hidden(pack)[places] @ matrix.t()), p)
        entropy = -torch.special.xlogy(p, p).sum(-1).mean()
        return loss, {"train/kl": float(loss.detach() - entropy)}

    @torch.no_grad()
    def evaluate(self, library: Library, items: list[Item]) -> dict[str, float]:
        tally = Tally(self.steps)
        for group in grouped(items, 1000):
            pack = library.pack(group).to(self.target.device, self.target.dtype)
            tally.add(pack, group, self._guesses(pack))
        return tally.numbers()

    def _guesses(self, pack: Pack) -> Iterator[Guess]:
        """What it guesses at place j stands for every step: as the root's child, its child, and so on."""
        places = ((pack.left >= 1) & pack.greedy.roll(-1)).nonzero()[:, 0]
        logits = self.hidden(pack)[places] @ self.module.get_output_embeddings().weight.t()
        best = self.module.vocabulary.kept[logits.topk(4, -1).indices]
        for step in range(self.steps):
            inside = pack.position[places] >= 1 + step
            yield step, places[inside] - 1 - step, best[inside]

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        save_student(self.module, folder, self.layers, training)
