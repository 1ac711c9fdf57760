"""A tree policy at work on a book: the trees it would have grown, how far the answer runs in them, and what is not known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specresearch.types import Frontier, Step, Tree, TreePolicy
from specresearch.whatif.book import Book


@dataclass(frozen=True)
class Lengths:
    """What a step would emit at each place, the end of the answer left aside; [B] each."""

    sure: Tensor  # emitted in the tree as far as it is known
    open: Tensor  # bool: the answer leaves it at a node that was not asked about, so it might run on
    lowest: Tensor
    highest: Tensor  # the truth lies in lowest .. highest
    nodes: Tensor  # of the tree, root counted

    @property
    def exact(self) -> Tensor:
        return self.lowest == self.highest


class Reader:
    """Answers a policy's questions from the book. A node that is alive and was never asked about makes its place unknown."""

    def __init__(self, book: Book, width: int):
        wide = max(0, width - book.logp.shape[-1])  # a policy may count on as many tokens as children
        self.logp, self.child = pad(book.logp, (0, wide), value=-torch.inf), pad(book.child, (0, wide), value=-1)
        self.book, self.width = book, width
        self.rows = torch.arange(book.places)[:, None]
        self.number = torch.empty(
            book.places, 0, dtype=torch.long
        )  # of the node in each draft slot, -1 if not asked about
        self.unknown = torch.zeros(book.places, dtype=torch.bool)

    def answer(self, frontier: Frontier) -> tuple[Tensor, None]:
        if frontier.start == 0:
            alive = torch.ones_like(frontier.tokens, dtype=torch.bool)
            node = torch.where(self.book.known, 0, -1)[:, None]
        else:
            above = self.number.gather(1, frontier.parents)
            at = (self.rows, above.clamp(min=0), frontier.tokens)
            alive = (above >= 0) & (self.logp[at] > -torch.inf)
            node = torch.where(alive, self.child[at], -1)
        self.number = torch.cat([self.number, node], 1)
        known, here = node >= 0, node.clamp(min=0)
        listed = (self.logp[self.rows, here] > -torch.inf).sum(-1)
        lacking = known & self.book.cut[self.rows, here] & (listed < self.width)
        self.unknown |= ((alive & ~known) | lacking).any(1)
        return self.logp[self.rows, here].masked_fill(~known[..., None], -torch.inf), None


def lengths(policy: TreePolicy, book: Book, nested: bool = False, within: bool = False) -> Lengths:
    """`nested`: the recorded tree was of the same kind and topk, so that a smaller one lacks nothing if it is full.
    `within`: the book holds what pruning left of a larger tree, so what it lacks was ranked too low to matter much.
    """
    reader = Reader(book, policy.width)
    tree = policy.grow(_step(book.places), reader.answer)
    accepted, opened = follow(tree, book, reader)
    opened &= accepted < policy.depth
    nodes = tree.valid.sum(1)
    full = nodes == policy.size
    sound = book.known & book.first & (~reader.unknown | (nested & full))
    closed = within & (book.first | full)
    lowest, highest = _bounds(policy, book, accepted, opened)
    exact = accepted + 1
    return Lengths(
        exact, opened & ~sound & ~closed, torch.where(sound, exact, lowest), torch.where(sound, exact, highest), nodes
    )


def _bounds(policy: TreePolicy, book: Book, accepted: Tensor, opened: Tensor) -> tuple[Tensor, Tensor]:
    """What a tree must emit and what it can, at places where it is not known as a whole."""
    count, running = reached(book, policy.width, policy.depth)
    most = torch.full_like(count, policy.depth + 1)
    lowest, highest = torch.ones_like(count), torch.where(running | ~book.first, most, count + 1)
    if policy.growth == "static":  # what a node's children are depends on its own answer alone
        lowest = torch.where(book.first, accepted + 1, lowest)
        highest = torch.where(book.first & book.known & ~opened, accepted + 1, highest)
    return lowest, torch.maximum(lowest, highest)


def _step(places: int) -> Step:
    zero, nobody = torch.zeros(places, dtype=torch.long), torch.zeros(places, 1, dtype=torch.long)
    rng: Any = None  # nothing is drawn
    return Step(zero, zero, zero, zero == 0, zero, nobody, rng, 0)


def follow(tree: Tree, book: Book, reader: Reader) -> tuple[Tensor, Tensor]:
    """How many tokens that came lie on a path from the root [B], and whether more might: the last node on it was not
    asked about, or may have more children than the book lists [B]."""
    rows, wide = torch.arange(book.places), reader.width
    at, number = torch.zeros_like(rows), torch.where(book.known, 0, -1)
    count = torch.zeros_like(rows)
    for level in range(min(tree.levels, book.after.shape[1])):
        token = book.after[:, level]
        here = tree.valid & (tree.parent == at[:, None]) & (tree.tokens == token[:, None])
        here[:, 0] = False
        found = here.any(1) & (count == level)
        below = torch.where(number >= 0, reader.child[rows, number.clamp(min=0), token.clamp(min=0)], -1)
        at, number = torch.where(found, here.long().argmax(1), at), torch.where(found, below, number)
        count += found
    listed = (reader.logp[rows, number.clamp(min=0)] > -torch.inf).sum(-1)
    return count, (number < 0) | (book.cut[rows, number.clamp(min=0)] & (listed < wide))


def reached(book: Book, width: int, depth: int) -> tuple[Tensor, Tensor]:
    """How far the answer runs among the `width` best children of nodes asked about, and whether it might run on."""
    rows = torch.arange(book.places)
    number, count = torch.where(book.known, 0, -1), torch.zeros(book.places, dtype=torch.long)
    going = torch.ones(book.places, dtype=torch.bool)
    opened = ~book.known
    for level in range(min(depth, book.after.shape[1])):
        token, here = book.after[:, level], number.clamp(min=0)
        own = book.logp[rows, here, token.clamp(min=0)]
        row = book.logp[rows, here]
        inside = (token >= 0) & (own > -torch.inf) & ((row > own[:, None]).sum(-1) < width)
        short = book.cut[rows, here] & ((row > -torch.inf).sum(-1) < width)
        opened |= going & (number >= 0) & ~inside & short & (token > -2)
        going &= (number >= 0) & inside
        count += going
        number = torch.where(going, book.child[rows, here, token.clamp(min=0)], -1)
        opened |= going & (number < 0) & (count < depth)
    return count, opened
