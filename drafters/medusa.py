"""Medusa: several heads on one feature of the target, each guessing one place further (arXiv:2401.10774)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specresearch.models.checkpoints import fitted_head
from specresearch.models.medusa import MedusaHeads
from specresearch.types import Drafter, Frontier, Kept, Step, Target, Tree, UserError, Verdict


class Medusa(Drafter):
    """Head k reads the last cached token, the one before the root, and guesses the token k + 1 places after the root.

    So all nodes of one depth have the same law, that of head `depth`, whatever their path; below the last head nothing
    is proposed.
    """

    def __init__(
        self,
        target: Target,
        *,
        ckpt: str = "auto",
        revision: str | None = None,
        dtype: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        head = fitted_head("medusa", target, ckpt, revision, dtype, config)
        if not isinstance(head, MedusaHeads):
            raise UserError(f"drafter.ckpt={ckpt} holds an EAGLE head: use drafter=eagle")
        self.heads, self.taps, self.vocab_size = head, head.config.taps, target.vocab_size
        self.device, self.dtype = target.device, next(head.parameters()).dtype

    def reserve(self, batch: int, capacity: int, slots: int) -> None:
        width = self.heads.config.hidden_size
        self.feature = torch.zeros(batch, width, dtype=self.dtype, device=self.device)  # of the last cached token

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], tokens: Tensor, length: Tensor, features: Tensor | None) -> None:
        assert features is not None
        row = torch.arange(len(rows), device=self.device)
        self.feature[torch.tensor(list(rows), device=self.device)] = features[row, length - 1].to(self.dtype)

    @torch.inference_mode()
    def expand(self, frontier: Frontier) -> Tensor:
        if frontier.start == 0:
            logits = self.heads.vocabulary.spread(self.heads(self.feature), self.vocab_size)
            self.laws = torch.nn.functional.pad(logits, (0, 0, 0, 1), value=-torch.inf)  # [B, heads + 1, V]
        head = frontier.depth.clamp(max=self.heads.config.heads)
        return self.laws[torch.arange(head.shape[0], device=self.device)[:, None], head]

    @torch.inference_mode()
    def commit(self, step: Step, tree: Tree, verdict: Verdict, features: Tensor | None) -> None:
        assert features is not None
        row = torch.arange(features.shape[0], device=self.device)
        node = verdict.path[row, (verdict.length - 1).clamp(min=0)].clamp(min=0)
        feature = features[row, node].to(self.dtype)
        self.feature = torch.where(step.live[:, None], feature, self.feature)

    def kept(self) -> Kept:
        return Kept((self,))
