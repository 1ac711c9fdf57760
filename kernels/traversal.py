"""Traversal verification: from the leaves of a tree to its root, so that whole branches are judged before their parts.

Legend: B batch, D levels + 1, V vocabulary. Weng et al. 2025 (arXiv:2505.12398), algorithm 2; torch alone, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specresearch.kernels.graph import may_ask
from specresearch.kernels.tree import links
from specresearch.kernels.verify import plain
from specresearch.types import Probs, Rng, Tree, Verdict


def traversal(tree: Tree, p: Probs, rng: Rng, state: type[Stack] | None = None) -> Verdict:
    """Verify a tree whose children were drawn without replacement from `tree.q`.

    Each round goes down to the first untried child, or judges a node that has none left: accept it and all above it, or
    delete it and mend the law of its parent. The root's chance is 1, so the walk ends; after 2 N - 1 rounds at the latest.
    """
    if tree.q is None:
        return plain(tree, p, rng)
    stack = (state or Stack)(tree, p)
    may_stop = may_ask(tree.tokens.device)
    for _ in range(2 * tree.tokens.shape[1] - 1):
        if may_stop and stack.done.all():
            break
        child = stack.at(stack.untried)
        leaf = ~stack.done & (child < 0)
        ok = rng.accept(stack.at(stack.node), torch.where(leaf, stack.at(stack.chance), 0.0)) & leaf
        stack.done = stack.done | ok
        stack.delete(leaf & ~ok)
        stack.descend(~stack.done & ~leaf, child.clamp(min=0))
    place = torch.arange(tree.levels + 1, device=tree.tokens.device)
    path = torch.where(place <= stack.depth[:, None], stack.node, -1)
    return Verdict(path, stack.depth + 1, rng.pick(stack.at(stack.law)))


class Stack:
    """The nodes from the root [B, D] down to the current one, at `depth` [B], and what is known of each.

    `law` [B, D, V]: what the token after the node follows if none of its tried children is kept; `draft` [B, D, V]: the law
    of its untried children; `chance` [B, D]: the node's, of being kept if all below it fails; `untried` [B, D]: its next
    child, -1 if none.
    """

    def __init__(self, tree: Tree, p: Probs):
        assert tree.q is not None
        self.tokens, self.q, self.p = tree.tokens, tree.q, p
        self.first_child, self.next_sibling = links(tree.parent, tree.valid)
        self.rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
        self.depth = torch.zeros_like(self.rows)
        self.done = torch.zeros_like(self.rows, dtype=torch.bool)
        law, shape = p(self.depth), (len(self.rows), tree.levels + 1)
        self.node = self.depth.new_zeros(shape)
        self.untried = self.node - 1
        self.law, self.draft = law.new_zeros(*shape, law.shape[1]), law.new_zeros(*shape, law.shape[1])
        self.chance = law.new_ones(shape, dtype=torch.float64)
        self.law[:, 0], self.draft[:, 0], self.untried[:, 0] = law, tree.q[:, 0], self.first_child[:, 0]

    def at(self, column: Tensor) -> Tensor:
        """The entry of the current node -> [B] or [B, V]"""
        return column[self.rows, self.depth]

    def put(self, column: Tensor, where: Tensor, value: Tensor) -> None:
        column[self.rows, self.depth] = torch.where(where.view(-1, *[1] * (value.dim() - 1)), value, self.at(column))

    def descend(self, down: Tensor, child: Tensor) -> None:
        """Rows that go `down` [B] now stand at `child` [B]."""
        token = self.tokens[self.rows, child][:, None]
        mass, q = (self.at(x).gather(1, token)[:, 0].double() for x in (self.law, self.draft))
        chance = torch.where(q > 0, self.at(self.chance) * mass / q, 0.0).clamp(max=1)  # q cannot draw it: it is dead
        self.put(self.untried, down, self.next_sibling[self.rows, child])
        self.depth = self.depth + down
        columns = (self.node, self.untried, self.chance, self.law, self.draft)
        new = (child, self.first_child[self.rows, child], chance, self.p(child), self.q[self.rows, child])
        for column, value in zip(columns, new):
            self.put(column, down, value.to(column.dtype))

    def delete(self, failed: Tensor) -> None:
        """Rows that `failed` [B] lose the current node and stand at its parent, whose laws are mended."""
        token = self.tokens[self.rows, self.at(self.node)][:, None]
        self.depth = self.depth - failed.long()
        law, draft, chance = (self.at(x) for x in (self.law, self.draft, self.chance))
        rest = (chance[:, None].to(law.dtype) * law - draft).clamp(min=0)
        mass = rest.sum(1, keepdim=True)
        # p = q leaves no residual; rounding alone can fail there, and then the law as it was is right to within rounding.
        self.put(self.law, failed, torch.where(mass > 0, rest / mass, law))
        self.put(self.chance, failed, self.mended(mass[:, 0].double(), chance))
        left = draft.scatter(1, token, 0.0)
        self.put(self.draft, failed, left / left.sum(1, keepdim=True).clamp(min=torch.finfo(left.dtype).tiny))

    def mended(self, mass: Tensor, chance: Tensor) -> Tensor:
        """Z / (Z + 1 - a) [B]"""
        total = mass + (1 - chance)
        return torch.where(total > 0, mass / total, 1.0)
