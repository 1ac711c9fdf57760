"""A draft vocabulary: the target's tokens that a head can propose, all of them or the most frequent ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specresearch.types import UserError


class DraftVocabulary(nn.Module):
    """`d2t` [draft] holds offsets, as in all published checkpoints: draft id i stands for the target's token i + d2t[i]."""

    d2t: Tensor

    def __init__(self, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.vocab_size, self.reduced = vocab_size, draft_vocab_size != vocab_size
        if not 0 < draft_vocab_size <= vocab_size:
            raise UserError(f"a draft vocabulary of {draft_vocab_size} tokens does not fit into one of {vocab_size}")
        if self.reduced:
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))

    @property
    def kept(self) -> Tensor:
        """Ids of the target that can be drafted, ascending -> [draft]"""
        if not self.reduced:
            return torch.arange(self.vocab_size)
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    @property
    def t2d(self) -> Tensor:
        """Whether each token of the target can be drafted -> bool [V]"""
        kept = self.kept
        return torch.zeros(self.vocab_size, dtype=torch.bool, device=kept.device).index_fill_(0, kept, True)

    def keep(self, ids: Tensor) -> None:
        """Choose the target's `ids` [draft]. Raises UserError unless they are ascending and exist."""
        bad = bool((ids[1:] <= ids[:-1]).any()) or bool((ids < 0).any()) or bool((ids >= self.vocab_size).any())
        if bad or (self.reduced and ids.shape != self.d2t.shape):
            raise UserError(f"d2t does not name {self.d2t.shape[0]} ascending tokens below {self.vocab_size}")
        self.d2t = ids - torch.arange(ids.shape[0], device=ids.device)

    def spread(self, logits: Tensor, size: int) -> Tensor:
        """Logits [..., draft] -> [..., size], -inf where nothing can be drafted. `size` = the target's vocabulary."""
        if not self.reduced and logits.shape[-1] == size:
            return logits
        full = logits.new_full((*logits.shape[:-1], size), -torch.inf)
        if not self.reduced:
            full[..., : logits.shape[-1]] = logits
            return full
        return full.scatter_(-1, self.kept.expand_as(logits), logits)


class SharedTokens:
    """Tokens that two vocabularies write alike, as (target's id, draft model's id), ascending by the first.

    The law of a draft model restricted to them and renormalised is the softmax of what `spread` gives: each logit goes to its
    token's own place, and there is nothing elsewhere. So q is the very law that children are drawn from.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], device: torch.device):
        table = torch.tensor(sorted(pairs), device=device).view(-1, 2)
        self.ours, self.theirs = table[:, 0].contiguous(), table[:, 1].contiguous()

    def spread(self, logits: Tensor, size: int) -> Tensor:
        """The draft model's logits [..., its V] -> [..., size] in the target's order, -inf at what is not shared."""
        full = logits.new_full((*logits.shape[:-1], size), -torch.inf)
        return full.index_copy_(-1, self.ours, logits.index_select(-1, self.theirs))

    def translate(self, tokens: Tensor) -> Tensor:
        """The target's ids, shared ones, to the draft model's; others (of nodes that nobody proposed) to any id."""
        place = torch.searchsorted(self.ours, tokens.contiguous()).clamp(max=len(self.ours) - 1)
        return self.theirs[place]


def take_from_target(head: nn.Module, names: tuple[str, ...], embedding: Tensor, output: Tensor) -> None:
    """Put the target's own tensors at `names` of `head`; rows of the draft vocabulary if `lm_head` is a reduced one."""
    vocabulary: Any = head.vocabulary
    for name in names:
        source = embedding if name == "embed_tokens.weight" else output
        if name == "lm_head.weight" and vocabulary.reduced:
            source = source[vocabulary.kept.to(source.device)]
        module = head.get_submodule(name.rpartition(".")[0])
        old: Any = module.weight
        if old.shape != source.shape:
            raise UserError(f"the head takes {name} {list(old.shape)} from its target, whose is {list(source.shape)}")
        module.weight = nn.Parameter(source.detach(), requires_grad=False)
