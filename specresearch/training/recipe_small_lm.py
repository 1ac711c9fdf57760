"""A small LM by distillation: a few of the target's own layers learn its law; embedding and head stay the target's.

With 3 layers of SmolLM2 the vocabulary matrix (49152 x 576) would cost nearly three times as much as the layers, for teacher
and student. So the law is compared on the `vocabulary` most frequent tokens and `sampled` random others, which stand for
all the rest (their logits raised by the log of how many each stands for): the normaliser stays right in expectation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specresearch.kernels.sampling import raise_half
from specresearch.models.distilled import save_student, student
from specresearch.models.hf import HFModel
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
        vocabulary: int,
        sampled: int,
        steps: int,
        name: str = "small_lm",
    ):
        self.target, self.layers, self.steps = target, list(layers), steps
        self.module = student(target, self.layers)
        self.normed = library.columns(("norm",), target.head.in_features)
        size = min(vocabulary, target.vocab_size)
        self.module.register_buffer("frequent", draft_tokens(target, library, size).to(target.device))
        self.sampled = min(sampled, target.vocab_size - size)

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
        places = (pack.chosen.roll(-1) & (pack.left >= 1)).nonzero()[:, 0]
        ids, bias = self._columns(dice)
        matrix = self.target.head.weight.detach()[ids]
        with torch.no_grad():
            p = raise_half(pack.features[places][:, self.normed] @ matrix.t() + bias).softmax(-1)
            entropy = -(p * p.clamp(min=1e-30).log()).sum(-1).mean()
        loss = F.cross_entropy(raise_half(self.hidden(pack)[places] @ matrix.t() + bias), p)
        return loss, {"train/kl": float(loss.detach() - entropy)}

    def _columns(self, dice: torch.Generator) -> tuple[Tensor, Tensor]:
        """Token ids to compare on [C], and what is added to their logits."""
        frequent: Tensor = self.module.frequent
        size = self.target.vocab_size
        weight = torch.ones(size, device=frequent.device).index_fill_(0, frequent, 0.0)
        if not self.sampled:
            return frequent, weight.new_zeros(len(frequent))
        others = torch.multinomial(weight, self.sampled, generator=dice)
        raised = math.log((size - len(frequent)) / self.sampled)
        bias = torch.cat([weight.new_zeros(len(frequent)), weight.new_full((self.sampled,), raised)])
        return torch.cat([frequent, others]), bias.to(self.target.dtype)

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
        best = (self.hidden(pack)[places] @ self.target.head.weight.detach().t()).topk(4, -1).indices
        for step in range(self.steps):
            inside = pack.position[places] >= 1 + step
            yield step, places[inside] - 1 - step, best[inside]

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        frequent = self.module._buffers.pop("frequent")
        try:
            save_student(self.module, folder, self.layers, training)
        finally:
            self.module.register_buffer("frequent", frequent)
