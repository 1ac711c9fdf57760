"""The EAGLE-3 recipe: head, loss and held-out numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specresearch.models.checkpoints import save_head
from specresearch.models.eagle import EagleHead
from specresearch.models.hf import HFModel
from specresearch.training import least_squares
from specresearch.training.eagle3 import Teacher, cross_entropies, unroll
from specresearch.training.held_out import Guess, Tally
from specresearch.training.packs import Item, Library, Pack, grouped
from specresearch.training.start import (
    default_taps,
    draft_tokens,
    eagle_config,
    from_head,
    from_target_layers,
)
from specresearch.types import Tap


class Eagle3:
    """Trains fc, the layer, its norms and, if it is its own, the vocabulary matrix; the embedding stays the target's."""

    def __init__(
        self,
        target: HFModel,
        library: Library,
        *,
        steps: int,
        decay: float,
        keep: float,
        draft_vocab: int,
        taps: Sequence[Tap] | None,
        fc_norm: bool,
        own_kv: bool,
        tied: bool,
        answers_only: bool = False,
        linear_heads: int = 0,
        start: str | None = None,
        name: str = "eagle",
    ):
        self.target, self.steps, self.decay, self.keep = target, steps, decay, keep
        self.answers_only = answers_only
        taps = tuple(taps or default_taps(len(target.blocks)))
        draft_vocab = min(draft_vocab, target.vocab_size)
        config = eagle_config(target, 3, draft_vocab, taps, fc_norm, own_kv, tied)
        most = min(config.num_heads, config.hidden_size // config.head_dim)
        if linear_heads > most:
            print(f"drafter.linear_heads={linear_heads}: the head has {most}, and all begin so", file=sys.stderr)
        self.columns = library.columns(taps, config.target_hidden_size)
        self.normed = library.columns(("norm",), config.target_hidden_size)
        kept = draft_tokens(target, library, draft_vocab)
        self.module = head = EagleHead(config).to(device=target.device, dtype=target.dtype)
        probe = library.pack(library.part(held_out=False)[:8])
        top = probe.features[:, self.columns[-config.hidden_size :]].float()
        scale = top.pow(2).mean(-1).sqrt().median()
        head.vocabulary.keep(kept.to(target.device))
        head.adopt(target.model.get_input_embeddings().weight, target.head.weight)
        from_target_layers(head, target, kept.to(target.device), scale)
        if start is not None:
            from_head(head, start, target)
        elif linear_heads:
            least_squares.start(
                head, library, self.columns, self.normed, target.head.weight.detach(), min(linear_heads, most)
            )

    def loss(self, pack: Pack, dice: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        if self.answers_only:
            pack = replace(pack, chosen=pack.chosen & pack.answer)
        features = pack.features[:, self.columns]
        vocabulary = self.module.vocabulary  # read anew: a checkpoint brings its own
        matrix = self.target.head.weight.detach()[vocabulary.kept]
        teacher = Teacher.of(pack, pack.features[:, self.normed], matrix, vocabulary.t2d)
        each = cross_entropies(self.module, pack, features, teacher, self.steps, self.keep, dice)
        total = torch.stack([self.decay**i * ce for i, ce in enumerate(each)]).sum()
        return total, {f"train/step_{i + 1}": float(ce.detach()) for i, ce in enumerate(each)}

    @torch.no_grad()
    def evaluate(self, library: Library, items: list[Item]) -> dict[str, float]:
        """The tally, and the acceptance sum min(p, q) of the first step."""
        tally, accepted = Tally(self.steps), [torch.zeros(0)]
        for group in grouped(items, 1500):
            pack = library.pack(group).to(self.target.device, self.target.dtype)
            tally.add(pack, group, self._guesses(pack, accepted))
        shares = torch.cat(accepted)
        return tally.numbers() | ({"held_out/acceptance": float(shares.mean())} if len(shares) else {})

    def _guesses(self, pack: Pack, accepted: list[Tensor]) -> Iterator[Guess]:
        for step, places, state in unroll(self.module, pack, pack.features[:, self.columns], self.steps):
            logits = self.module.logits(state)
            if step == 0:  # every seventh place: the target's whole vocabulary is costly
                accepted.append(self._overlap(logits[::7], pack.features[places[::7] + 1][:, self.normed]).cpu())
            yield step, places, self.module.vocabulary.kept[logits.topk(4, -1).indices]

    def _overlap(self, logits: Tensor, normed: Tensor) -> Tensor:
        """sum min(p, q) with the target's whole law: what the draft vocabulary lacks counts as lost."""
        p = (normed @ self.target.head.weight.detach().t()).float().softmax(-1)[:, self.module.vocabulary.kept]
        return torch.minimum(p, logits.float().softmax(-1)).sum(-1)

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        head = EagleHead(self.module.config)
        head.load_state_dict(self.module.state_dict())
        save_head(head.to(torch.bfloat16), folder, training)
