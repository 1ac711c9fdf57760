"""Best-first trees (OPT-Tree, arXiv:2406.17276; DySpec, arXiv:2410.11744): reveal the most probable node next, keep it."""

from __future__ import annotations

import torch
from torch import Tensor

from specresearch.trees.growth import Growth, law_of, positive, resolve_draw
from specresearch.types import Ask, Step, Tree, TreePolicy, UserError


class BestFirstTree(TreePolicy):
    """Each node keeps one open place for its next child. The place of highest value is filled, size-1 times.

    With `draw=topk` a place is worth the path probability of the token that would fill it. With drawn children the token
    must stay unknown until the place is chosen, so a place is worth the path probability of its node times the draft
    mass not yet drawn there: decided from revealed tokens alone, hence `predictable`, and q stays true.
    One drafter call per node: for cheap drafters.
    """

    growth = "predictable"

    def __init__(self, *, size: int, depth: int, topk: int, temperature: float, draw: str | None = None):
        positive(depth=depth, topk=topk, size=size)
        if size < depth + 1:
            raise UserError(
                f"tree.size={size} cannot hold tree.depth={depth} levels and the root: "
                f"use tree.size={depth + 1} or more, or tree.depth={max(size - 1, 1)}"
            )
        self.draw = resolve_draw(draw, temperature, "topk")
        self.law = law_of(self.draw)
        self.temperature = None if self.draw == "topk" else temperature
        self.size, self.depth, self.width = size, depth, topk

    def smaller(self) -> list[BestFirstTree]:
        return [
            BestFirstTree(size=self.size, depth=depth, topk=topk, temperature=self.temperature or 0.0, draw=self.draw)
            for depth in range(1, self.depth + 1)
            for topk in range(1, self.width + 1)
        ]

    def grow(self, step: Step, ask: Ask) -> Tree:
        batch, device = step.root.shape[0], step.root.device
        growth = Growth(step, ask, self.depth)
        tokens = torch.zeros(batch, self.size, dtype=torch.long, device=device)
        parent, depth = tokens.clone(), tokens.clone()
        tokens[:, 0], parent[:, 0] = step.root, -1
        places: _Places | None = None
        score, q = growth.root()
        for node in range(1, self.size):
            places = places or _Places(self, score, q)
            deep = depth[:, node - 1] >= self.depth
            places.open(node - 1, score[:, 0], None if q is None else q[:, 0], deep)
            above, token = places.fill(node, step)
            parent[:, node], tokens[:, node] = above, token
            depth[:, node] = depth.gather(1, above[:, None])[:, 0] + 1
            if node < self.size - 1:
                score, q = growth.expand(above[:, None], token[:, None])
        assert places is not None
        total = places.total
        return Tree(tokens, parent, depth, total > -torch.inf, total, self.law, self.growth, self.depth, places.q)


class _Places:
    """The open places of one batch of trees; [B, N] each. A node's draft slot equals its number."""

    def __init__(self, policy: BestFirstTree, score: Tensor, q: Tensor | None):
        batch, vocab, size = score.shape[0], score.shape[-1], policy.size
        self.draw, self.width = policy.draw, policy.width
        self.rows = torch.arange(batch, device=score.device)
        self.score = score.new_full((batch, size, vocab), -torch.inf)
        self.q = None if q is None else q.new_zeros(batch, size, vocab)
        self.left = None if q is None else q.new_zeros(batch, size, vocab)  # q less the tokens already drawn
        self.value = score.new_full((batch, size), -torch.inf)  # log-value of each node's open place
        self.total = self.value.clone()  # log path probability of each node
        self.total[:, 0] = 0
        self.used = torch.zeros(batch, size, dtype=torch.long, device=score.device)

    def open(self, node: int, score: Tensor, q: Tensor | None, deep: Tensor) -> None:
        """The drafter answered for `node`: score, q [B, V]; `deep` [B] = it may have no children."""
        self.score[:, node] = score
        worth = self.total[:, node] + (0 if q is not None else score.max(-1).values)
        if self.q is not None and self.left is not None and q is not None:
            self.q[:, node] = self.left[:, node] = q
        silent = score.max(-1).values == -torch.inf
        self.value[:, node] = torch.where(deep | silent, -torch.inf, worth)

    def fill(self, node: int, step: Step) -> tuple[Tensor, Tensor]:
        """Fill the best place with `node` -> its parent [B] and token [B]; total is -inf where there was none."""
        best, above = self.value.max(1)
        rows = self.rows
        if self.left is None:
            logp, token = self.score[rows, above].max(-1)
        else:
            token = step.rng.draw(self.left[rows, above][:, None], node)[:, 0]
            logp = (
                self.score[rows, above].gather(1, token.clamp(min=0)[:, None])[:, 0].masked_fill(token < 0, -torch.inf)
            )
        alive = (best > -torch.inf) & (logp > -torch.inf)
        token = torch.where(alive, token, 0)
        self.total[:, node] = torch.where(alive, self.total[rows, above] + logp, -torch.inf)
        self.used[rows, above] += 1
        worth = self._next_value(above, token, alive)
        closed = ~alive | (self.used[rows, above] >= self.width)
        self.value[rows, above] = torch.where(closed, -torch.inf, worth)
        return torch.where(alive, above, 0), token

    def _next_value(self, above: Tensor, token: Tensor, alive: Tensor) -> Tensor:
        """Value of the place after the one that `token` filled."""
        rows = self.rows
        if self.left is None:
            self.score[rows, above, token] = self.score[rows, above, token].masked_fill(alive, -torch.inf)
            return self.total[rows, above] + self.score[rows, above].max(-1).values
        missed = (1 - self.left[rows, above, token]).clamp(min=1e-9).log().to(self.value.dtype)
        if self.draw == "iid":  # the value must fall with every draw, or one node would take all places
            return self.value[rows, above] + missed
        self.left[rows, above, token] = 0
        mass = self.left[rows, above].sum(-1)
        return self.total[rows, above] + mass.log().to(self.value.dtype)
