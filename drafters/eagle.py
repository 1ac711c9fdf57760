"""EAGLE: a one-layer head that goes on from the target's own features (Li et al., arXiv:2401.15077, 2503.01840)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specresearch.kernels.attention import seen_slots
from specresearch.kernels.graph import may_ask
from specresearch.models.cache import LayerShape, SlotCache
from specresearch.models.checkpoints import fitted_head
from specresearch.models.eagle import EagleHead
from specresearch.models.fast import FastEagle
from specresearch.types import Drafter, Frontier, Kept, Step, Target, Tree, UserError, Verdict

PREFILL_CHUNK = 512  # entries fed at once: bounds the mask of a long prompt
MOST_DUE = 64  # entries that may wait until somebody asks: one pass over many costs little more than one over one


class Eagle(Drafter):
    """Entry t of its cache is made of the target's features of token t and of token t+1, at position t.

    With L tokens in the target's cache and the root at place L, entries 0 .. L-1 can be made, and the last one asks for
    the root's children. It is due when the root is asked about: the entries that the tokens accepted since the last time
    made possible are fed then, in one causal pass. A node of depth d stands at position L-1+d, with its parent's output
    for features; it sees the entries and its own ancestors, and is forgotten with the step.
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
        head = fitted_head("eagle", target, ckpt, revision, dtype, config)
        if not isinstance(head, EagleHead):
            raise UserError(f"drafter.ckpt={ckpt} holds Medusa heads: use drafter=medusa")
        self.head, self.taps, self.forward = head, head.config.taps, FastEagle(head)
        self.vocab_size, self.device = target.vocab_size, target.device
        self.dtype = head.fc.weight.dtype

    def reserve(self, batch: int, capacity: int, slots: int) -> None:
        self.forward.follow()
        c = self.head.config
        shape = LayerShape(c.num_kv_heads, c.head_dim, c.head_dim, self.dtype, self.device)
        self.cache = SlotCache([shape], batch, capacity + max(slots, MOST_DUE))
        self.rows = torch.arange(batch, device=self.device)
        self.due = torch.ones(batch, dtype=torch.long, device=self.device)  # entries that can be made and are not yet
        width = len(c.taps) * c.target_hidden_size
        self.features = torch.zeros(
            batch, 1, width, dtype=self.dtype, device=self.device
        )  # theirs, [B, due or more, F]
        self.later: list[tuple[Tensor, Tensor]] = []  # the same of steps since then in which nobody asked
        self.waiting = 0  # the width of those
        self.states = torch.zeros(batch, slots, c.hidden_size, dtype=self.dtype, device=self.device)  # by draft slot
        self.asked = False

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], tokens: Tensor, length: Tensor, features: Tensor | None) -> None:
        assert features is not None
        self.forward.follow()
        here, features = torch.tensor(list(rows), device=self.device), features.to(self.dtype)
        self.features[here, 0] = features[torch.arange(len(rows), device=self.device), length - 1]
        self.due[here] = 1
        self.later = [(feature, count.index_fill(0, here, 0)) for feature, count in self.later]
        for begin in range(0, tokens.shape[1] - 1, PREFILL_CHUNK):
            following = tokens[:, begin + 1 : begin + 1 + PREFILL_CHUNK]
            width = following.shape[1]
            state = self.head.project(features[:, begin : begin + width])
            position = torch.arange(begin, begin + width, device=self.device).expand(len(rows), -1)
            before = torch.full_like(length, begin)
            self._run(following, state, position, before, self._causal(width), begin + width, here, list(rows))

    @torch.inference_mode()
    def expand(self, frontier: Frontier) -> Tensor:
        step, start, width = frontier.step, frontier.start, frontier.tokens.shape[1]
        if start == 0:
            state = self._root(step)
        else:
            parent = frontier.parents.clamp(min=0)[..., None].expand(-1, -1, self.states.shape[-1])
            base = (step.length - 1).clamp(min=0)
            position, visible = base[:, None] + frontier.depth, step.extent - 1 + start + width
            before = self.states.gather(1, parent)
            state = self._run(frontier.tokens, before, position, base, frontier.ancestors, visible, start=start)
        self.states[:, start : start + width] = state
        return self.head.vocabulary.spread(self.head.logits(state), self.vocab_size)

    def _root(self, step: Step) -> Tensor:
        """Make the entries that are due, the root's last -> its state [B, 1, H]"""
        self.asked = True
        self._join()
        width = int(self.due.max()) if may_ask(self.device) else self.features.shape[1]
        first = (step.length - self.due).clamp(min=0)
        position = first[:, None] + torch.arange(width, device=self.device)
        following = step.tokens.gather(1, torch.minimum(position + 1, step.length[:, None]))
        state = self.head.project(self.features[:, :width])
        state = self._run(following, state, position, first, self._causal(width), step.extent - 1 + width)
        return state[self.rows, self.due - 1][:, None]

    def _run(
        self,
        tokens: Tensor,
        state: Tensor,
        position: Tensor,
        length: Tensor,
        mask: Tensor,
        visible: int,
        rows: Tensor | None = None,
        cached: list[int] | None = None,
        start: int = 0,
    ) -> Tensor:
        """Tokens and states, written `start` slots behind the first `length` [R] entries, which all of them see; `mask`
        [R or 1, T, start + T] says what they see of the slots behind."""
        at = (self.rows if rows is None else rows) * self.cache.slots + length + start
        slots = at[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.cache.aim(slots.flatten(), cached, visible)
        seen = seen_slots(mask.expand(len(length), -1, -1), length, visible)
        if (window := self.head.config.window) is not None:
            slot = torch.arange(visible, device=self.device)
            seen &= (slot >= length[:, None])[:, None] | (position[..., None] - slot < window)
        return self.forward(tokens.clamp(max=self.head.config.vocab_size - 1), state, position, seen, self.cache)

    def _causal(self, width: int) -> Tensor:
        place = torch.arange(width, device=self.device)
        back = place[:, None] - place
        return ((back >= 0) & (back < (self.head.config.window or width)))[None]

    @torch.inference_mode()
    def commit(self, step: Step, tree: Tree, verdict: Verdict, features: Tensor | None) -> None:
        assert features is not None
        if (nodes := tree.tokens.shape[1]) > 1:
            path = verdict.path[:, :nodes].clamp(min=0)
            features = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
        features, width = features.to(self.dtype), features.shape[1]
        if not self.asked and self.features.shape[1] + self.waiting + width <= MOST_DUE:
            self.later.append((features, verdict.length))
            self.waiting += width
            return
        if not self.asked:
            self._root(step)
        self.features, self.due, self.asked = features, verdict.length.clamp(min=1), False

    def kept(self) -> Kept:
        return Kept((self,), (self.cache, self.forward.block))

    def _join(self) -> None:
        """Let all that waits be due: the features of each row's entries without gaps, in order."""
        if not self.later:
            return
        all_of_them = [(self.features, self.due), *self.later]
        there = [torch.arange(f.shape[1], device=self.device) < count[:, None] for f, count in all_of_them]
        first = torch.cat(there, 1).sort(dim=1, descending=True, stable=True).indices
        features = torch.cat([f for f, _ in all_of_them], 1)
        self.features = features.gather(1, first[..., None].expand_as(features))
        self.due = torch.stack([count for _, count in all_of_them]).sum(0)
        self.later, self.waiting = [], 0
