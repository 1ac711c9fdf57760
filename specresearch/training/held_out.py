"""Numbers on held-out dialogues, the same for every kind of drafter.

The accepted length is predicted by walking greedy answers as decoding would: from a root the head guesses token after
token; guesses are accepted while they equal the text, then the target's own token follows and is the next root. The
mean accuracy over all places is another quantity: it counts places that decoding jumps over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specresearch.training.packs import Item, Pack

Guess = tuple[int, Tensor, Tensor]  # step i, places t [R], the best tokens [R, 4] for token t+2+i


class Tally:
    """Counts of greedy answers: right guesses by step, and walks through each answer."""

    def __init__(self, steps: int):
        self.steps = steps
        self.right = torch.zeros(2, steps)  # the best guess, one of the best four
        self.asked = torch.zeros(steps)
        self.walks: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])

    def add(self, pack: Pack, group: Sequence[Item], guesses: Iterable[Guess]) -> None:
        size = len(pack.tokens)
        hits = torch.zeros(2, self.steps, size, dtype=torch.bool, device=pack.tokens.device)
        for step, places, best in guesses:
            inside = pack.left[places] >= 2 + step
            places, best = places[inside], best[inside]
            label, greedy = pack.tokens[places + 2 + step], pack.greedy[places + 2 + step]
            same = (best == label[:, None]) & greedy[:, None]
            hits[0, step, places], hits[1, step, places] = same[:, 0], same.any(1)
            self.asked[step] += greedy.sum().cpu()
            self.right[:, step] += hits[:, step, places].sum(1).cpu()
        for number, item in enumerate(group):
            if item.dialogue.temperature == 0:
                own = hits[:, :, pack.dialogue == number]
                for each, table in zip(self.walks, own):
                    each.append(walk(table, item.dialogue.answer))

    def numbers(self) -> dict[str, float]:
        """`walk` predicts a chain; `walk_top4`, where one of four guesses may be right, bounds a tree of four from above.

        What nothing was counted for is left out.
        """
        walked = {"held_out/walk": pooled(self.walks[0]), "held_out/walk_top4": pooled(self.walks[1])}
        found = {name: length for name, length in walked.items() if length is not None}
        for name, right in zip(("top1", "top4"), self.right):
            asked = [i for i in range(self.steps) if self.asked[i]]
            found |= {f"held_out/{name}_step_{i + 1}": float(right[i] / self.asked[i]) for i in asked}
        return found


def walk(hits: Tensor, first: int) -> tuple[int, int]:
    """`hits` [steps, L] bool: at place t, is the i-th guess token t+2+i of the text? The first root is token `first`.

    -> tokens emitted after the first root, target passes they took. Chains are as long as `hits` has steps.
    """
    length = hits.shape[1]
    accepted = hits.long().cumprod(0).sum(0).tolist()
    root, passes = first, 0
    while root < length - 1:
        root = min(root + accepted[root - 1] + 1, length - 1)
        passes += 1
    return length - 1 - first, passes


def pooled(pairs: Sequence[tuple[int, int]]) -> float | None:
    """Accepted length over several texts; None if there was nothing to decode."""
    passes = sum(p for _, p in pairs)
    return sum(n for n, _ in pairs) / passes if passes else None
