"""EAGLE-1 (Li et al., arXiv:2401.15077): the head predicts the target's next feature, and by the target's own head its law."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specresearch.kernels.sampling import raise_half
from specresearch.models.checkpoints import save_head
from specresearch.models.eagle import EagleHead, Growing
from specresearch.models.hf import HFModel
from specresearch.training.held_out import Guess, Tally
from specresearch.training.packs import Item, Library, Pack, grouped
from specresearch.training.start import eagle_config


class Eagle1:
    """Place t reads feature t and token t+1, and learns feature t+1 (smooth L1) and the law after token t+1 (0.1 of it)."""

    def __init__(
        self,
        target: HFModel,
        library: Library,
        *,
        law_weight: float,
        noise: float,
        steps: int,
        own_kv: bool,
        name: str = "eagle1",
    ):
        self.target, self.law_weight, self.noise, self.steps = target, law_weight, noise, steps
        config = eagle_config(target, 1, target.vocab_size, ("norm",), False, own_kv, tied=True)
        self.normed = library.columns(("norm",), config.hidden_size)
        self.module = EagleHead(config).to(device=target.device, dtype=target.dtype)
        self.module.adopt(target.model.get_input_embeddings().weight, target.head.weight)

    def loss(self, pack: Pack, dice: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        features = pack.features[:, self.normed]
        shaken = (torch.rand(features.shape, generator=dice, device=features.device) - 0.5).to(features.dtype)
        predicted = self._outputs(pack, features + self.noise * shaken, 1)[0]
        places = ((pack.left >= 2) & pack.chosen.roll(-2)).nonzero()[:, 0]
        real = features[places + 1]
        regression = F.smooth_l1_loss(predicted[places], real)
        with torch.no_grad():
            p = raise_half(self.module.logits(real)).softmax(-1)
        law = F.cross_entropy(raise_half(self.module.logits(predicted[places])), p)
        numbers = {"train/feature": float(regression.detach()), "train/law": float(law.detach())}
        return regression + self.law_weight * law, numbers

    def _outputs(self, pack: Pack, features: Tensor, steps: int) -> list[Tensor]:
        """The head's outputs [T, H] of each step; step i at place t reads its own output at t and token t+1+i."""
        cache, state, found, size = Growing(), features[None], [], len(pack.tokens)
        before = (pack.dialogue[:, None] == pack.dialogue) & (pack.position[:, None] >= pack.position)
        mask = [before]
        for step in range(steps):
            tokens = pack.tokens[(torch.arange(size, device=pack.tokens.device) + 1 + step).clamp(max=size - 1)]
            state = self.module(tokens[None], state, (pack.position + step)[None], torch.cat(mask, 1)[None], cache)
            found.append(state[0])
            mask.append(torch.eye(size, dtype=torch.bool, device=before.device))
        return found

    @torch.no_grad()
    def evaluate(self, library: Library, items: list[Item]) -> dict[str, float]:
        tally = Tally(self.steps)
        for group in grouped(items, 500):
            pack = library.pack(group).to(self.target.device, self.target.dtype)
            tally.add(pack, group, self._guesses(pack))
        return tally.numbers()

    def _guesses(self, pack: Pack) -> Iterator[Guess]:
        for step, state in enumerate(self._outputs(pack, pack.features[:, self.normed], self.steps)):
            places = ((pack.left >= 2 + step) & pack.greedy.roll(-2 - step)).nonzero()[:, 0]
            yield step, places, self.module.logits(state[places]).topk(4, -1).indices

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        head = EagleHead(self.module.config)
        head.load_state_dict(self.module.state_dict())
        save_head(head.to(torch.bfloat16), folder, training)
