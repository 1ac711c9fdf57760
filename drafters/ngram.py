"""Prompt lookup: the next token is what followed the longest earlier match of the last few tokens.

A generalisation of prompt lookup decoding (Saxena 2023) to a next-token law, so that any tree policy can use it: all
matches vote at once, and each node of a tree is matched with its own path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specresearch.types import Ask, Drafter, Frontier, Step, Target, Tree, TreePolicy, UserError


class NGram(Drafter):
    """Lives on the host: each row has an index that grows with it, so a step costs the same however long the context is."""

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
        self.max_n, self.min_n, self.recent, self.backoff = max_n, min_n, order == "recency", float(backoff)
        self.rows: dict[int, Index] = {}

    def extend(self, rows: Sequence[int], tokens: Tensor, length: Tensor, features: Tensor | None) -> None:
        self.release(rows)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def propose(self, step: Step, policy: TreePolicy, ask: Ask) -> Tree:
        indices = self._catch_up(step)
        if not any(index.votes(index.tokens, self.backoff, self.recent) for index in indices.values()):
            return Tree.of_root(step)
        return super().propose(step, policy, ask).trim()

    def expand(self, frontier: Frontier) -> Tensor:
        """Logits = log of the votes: each match votes for its next token, `backoff` times less per token of shorter match."""
        shape = (*frontier.tokens.shape, self.vocab_size)
        logits = torch.full(shape, -torch.inf, device=frontier.tokens.device)
        paths = frontier.path.tolist()
        for row, index in self._catch_up(frontier.step).items():
            for node, path in enumerate(paths[row]):
                line = index.tokens[-self.max_n :] + [token for token in path if token >= 0]
                if votes := index.votes(line, self.backoff, self.recent):
                    value = torch.tensor(list(votes.values()), dtype=torch.float64).log().to(logits)
                    logits[row, node, torch.tensor(list(votes), device=logits.device)] = value
        return logits

    def _catch_up(self, step: Step) -> dict[int, Index]:
        """Indices of the live rows, the root their newest token."""
        live, length, found = step.live.tolist(), step.length.tolist(), {}
        for row in (row for row, alive in enumerate(live) if alive):
            index, end = self.rows.get(row), length[row] + 1
            if index is None or len(index.tokens) > end:
                index = self.rows[row] = Index(self.min_n, self.max_n)
            index.extend(step.tokens[row, len(index.tokens) : end].tolist())
            found[row] = index
        return found


class Index:
    """What followed every run of `min_n` to `max_n` tokens of one text: where last, and how often.

    A token costs as many insertions as there are lengths, a question a few lookups; memory grows with the text.
    """

    def __init__(self, min_n: int, max_n: int):
        self.sizes, self.tokens = range(min_n, max_n + 1), list[int]()
        self.after: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}  # run -> {next: (place of next, times)}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            at = len(self.tokens)
            for size in self.sizes[: max(0, at - self.sizes.start + 1)]:
                followers = self.after.setdefault(tuple(self.tokens[at - size :]), {})
                followers[token] = (at, followers.get(token, (0, 0))[1] + 1)
            self.tokens.append(token)

    def votes(self, line: Sequence[int], backoff: float, recent: bool) -> dict[int, float]:
        """For what may follow `line`. A match that is d tokens shorter than the longest votes with backoff^d: each for
        itself, or, if `recent`, divided by its distance from the end, and only the best vote for a token counts."""
        found = [self.after.get(tuple(line[-n:]), {}) if n <= len(line) else {} for n in self.sizes]
        while found and not found[-1]:
            found.pop()
        votes: dict[int, float] = {}
        for shorter, followers in enumerate(reversed(found)):
            weight, longer = backoff**shorter, found[-shorter] if shorter else {}
            for token, (place, times) in followers.items():
                if recent:
                    vote = weight / (len(self.tokens) - place)
                    votes[token] = max(votes.get(token, 0.0), vote)
                else:
                    votes[token] = votes.get(token, 0.0) + weight * (times - longer.get(token, (0, 0))[1])
        return votes
