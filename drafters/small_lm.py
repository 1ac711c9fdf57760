"""A smaller language model of the same vocabulary, or the target's own first layers (early exit)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specresearch.models.checkpoints import shipped
from specresearch.models.distilled import is_student, load_student
from specresearch.models.hf import HFModel
from specresearch.models.linear import halve
from specresearch.models.loading import load, require_same_vocabulary, resolve_dtype
from specresearch.types import Drafter, Frontier, Step, Target, Tree, UserError, Verdict


class SmallLM(Drafter):
    """Its cache lags behind the target's by the tokens since it was last asked: they are fed, with the next root, in one
    causal pass. That is right whatever nodes the tree kept, and costs no pass of its own."""

    def __init__(
        self,
        target: Target,
        *,
        id: str | None = None,
        revision: str | None = None,
        layers: int | None = None,
        dtype: str | None = None,
    ):
        if not isinstance(target, HFModel):
            raise UserError("drafter=small_lm needs a Hugging Face target: use target=hf or target=smollm2")
        if id is not None and layers is not None:
            raise UserError("drafter.id and drafter.layers name two models: give one of them")
        if layers is not None:
            self.model = target.first_layers(layers)
        else:
            self.model = _other(target, id or _shipped(target.name), revision, dtype)
            if target.half:
                halve(self.model.model)
        self.vocab_size = target.vocab_size
        self.vocabulary = getattr(self.model.model, "vocabulary", None)  # a distilled one knows some tokens alone

    def reserve(self, batch: int, capacity: int, slots: int) -> None:
        self.model.reserve(batch, capacity, slots)
        self.most = slots  # tokens that may wait: one pass over many costs little more than one over one
        self.length = torch.zeros(batch, dtype=torch.long, device=self.model.device)  # tokens in this model's cache
        self.lag = 0  # most tokens by which it can be behind

    def extend(self, rows: Sequence[int], tokens: Tensor, length: Tensor, features: Tensor | None) -> None:
        self.model.extend(rows, tokens, length, ())
        self.length[list(rows)] = length

    def expand(self, frontier: Frontier) -> Tensor:
        logits = self._root(frontier.step) if frontier.start == 0 else self._nodes(frontier)
        if self.vocabulary is not None:
            return self.vocabulary.spread(logits, self.vocab_size)
        # Padded embedding rows on either side: cut what the target lacks, forbid what this model lacks.
        missing = self.vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _root(self, step: Step) -> Tensor:
        """Feed what the cache lacks, the root last -> [B, 1, V]."""
        behind = torch.where(step.live, step.length - self.length, 0)
        width = 1 + (int(behind.max()) if behind.device.type == "cpu" else self.lag)  # no device read on a GPU
        length = step.length - behind
        position = length[:, None] + torch.arange(width, device=behind.device)
        tokens = step.tokens.gather(1, torch.minimum(position, step.length[:, None]))
        causal = torch.ones(width, width, dtype=torch.bool, device=behind.device).tril().expand(len(behind), -1, -1)
        logits, _ = self.model.run(tokens, position, length, causal, step.extent, keep=behind)
        self.length, self.lag = step.length.clone(), 0
        return logits

    def _nodes(self, frontier: Frontier) -> Tensor:
        step = frontier.step
        position = step.length[:, None] + frontier.depth
        return self.model.run(
            frontier.tokens, position, step.length, frontier.ancestors, step.extent, start=frontier.start
        )[0]

    def commit(self, step: Step, tree: Tree, verdict: Verdict, features: Tensor | None) -> None:
        fresh = verdict.path.shape[1]
        if self.lag + fresh > self.most:
            self._root(step)
        self.lag += fresh  # the tokens themselves come from the loop's history, in `_root`


def _shipped(target: str) -> str:
    try:
        return shipped("small_lm", target)
    except UserError as error:
        raise UserError(
            f"drafter=small_lm needs a model: give drafter.id=<Hub id or folder>, or drafter.layers=k to draft with the "
            f"target's first k layers ({error})"
        ) from None


def _other(target: HFModel, id: str, revision: str | None, dtype: str | None) -> HFModel:
    """A distilled model of this target, or any causal LM of the same vocabulary."""
    if isinstance(id, str) and is_student(id):
        return load_student(id, target, resolve_dtype(dtype, target.device) if dtype else None)
    model = load(id=id, revision=revision, dtype=dtype or str(target.dtype)[6:], device=str(target.device))
    require_same_vocabulary(target, model, f"drafter.id={id}")
    return model
