"""Prompt lookup: the next token is what followed the longest earlier match of the last few tokens.

A generalisation of prompt lookup decoding (Saxena 2023) to a next-token law, so that any tree policy can use it: all
matches vote at once, and each node of a tree is matched with its own path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specresearch.types import Ask, Drafter, Frontier, Step, Target, Tree, TreePolicy, UserError


class NGram(Drafter):
    """Keeps no state. Cost per expansion: O(W * T * max_n) comparisons and one [W, V] table."""

    def __init__(self, target: Target, *, max_n: int, min_n: int, order: str, backoff: float):
        if not type(min_n) is type(max_n) is int or not 1 <= min_n <= max_n <= 64:
            raise UserError(
                f"drafter.min_n={min_n}, drafter.max_n={max_n}: use whole numbers, 1 <= min_n <= max_n <= 64"
            )
        if order not in ("recency", "frequency"):
            raise UserError(f"drafter.order={order} is unknown: use recency or frequency")
        if not isinstance(backoff, int | float) or not 0 < backoff <= 1:
            raise UserError(f"drafter.backoff={backoff}: use a number above 0 and up to 1")
        self.vocab_size = target.vocab_size
        self.max_n, self.min_n, self.order, self.backoff = max_n, min_n, order, backoff

    def propose(self, step: Step, policy: TreePolicy, ask: Ask) -> Tree:
        """Reads two numbers from the device: whether anything matches, and how much of the tree was filled."""
        context = _suffix(step, step.tokens.new_empty(step.root.shape[0], 1, 0), self.max_n)
        matched = self._match(step, context) >= self.min_n
        if not (matched & step.live[:, None, None]).any():
            return Tree.of_root(step)
        return super().propose(step, policy, ask).trim()

    def expand(self, frontier: Frontier) -> Tensor:
        """Logits = log of the votes: each match votes for its next token, `backoff` times less per token of shorter match."""
        step = frontier.step
        match = self._match(step, _suffix(step, frontier.path, self.max_n))  # [B, W, T]
        batch, width, sites = match.shape
        best = match.amax(-1, keepdim=True)
        vote = torch.where(match >= self.min_n, self.backoff ** (best - match).double(), 0.0)
        if self.order == "recency":
            vote = vote / (step.length[:, None] - torch.arange(sites, device=match.device)).clamp(min=1)[:, None]
        following = step.tokens[:, : step.extent + 1].roll(-1, 1)[:, None].expand(batch, width, sites)
        table = torch.zeros(batch, width, self.vocab_size, dtype=torch.float64, device=match.device)
        table.scatter_reduce_(-1, following, vote, "amax" if self.order == "recency" else "sum")
        return table.log().float()

    def _match(self, step: Step, context: Tensor) -> Tensor:
        """How many of the last tokens of `context` [B, W, max_n] end at each site of the history -> [B, W, T].

        A site counts only if the history knows the token after it.
        """
        history = step.tokens[:, : step.extent + 1]
        sites = torch.arange(history.shape[1], device=history.device)
        run = (sites < step.length[:, None])[:, None].expand(-1, context.shape[1], -1)
        match = torch.zeros(run.shape, dtype=torch.long, device=history.device)
        for back in range(self.max_n):
            shifted = torch.nn.functional.pad(history, (back, 0), value=-2)[:, None, : history.shape[1]]
            run = run & (shifted == context[..., -1 - back, None])
            match += run
        return match


def _suffix(step: Step, path: Tensor, count: int) -> Tensor:
    """The last `count` tokens of history (root included) followed by each node's path [B, W, D] -> [B, W, count].

    -1 stands before the first token.
    """
    batch, width, _ = path.shape
    index = step.length[:, None] - torch.arange(count - 1, -1, -1, device=path.device)
    known = torch.where(index >= 0, step.tokens.gather(1, index.clamp(min=0)), -1)
    line = torch.cat([known[:, None].expand(batch, width, count), path], -1)
    end = count + (path >= 0).sum(-1, keepdim=True)
    return line.gather(-1, end - count + torch.arange(count, device=path.device))
