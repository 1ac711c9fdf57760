"""Trees whose shape is fixed before decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specresearch.kernels.graph import constant
from specresearch.trees.growth import MOST_NODES, Growth, law_of, positive, resolve_draw
from specresearch.trees.presets import PRESETS, parents_of
from specresearch.types import Ask, Step, Tree, TreePolicy, UserError

EXAMPLES = {"parents": "[-1,0,0,1]", "widths": "[4,2,1]"}


def parents_of_widths(widths: Sequence[int]) -> list[int]:
    """Children per node at each level -> parent pointers: [2, 1] is a root with two chains of two."""
    parents, level = [-1], [0]
    for width in widths:
        positive(widths=width)
        require_size(len(level) * width)
        children = [node for node in level for _ in range(width)]
        level = list(range(len(parents), len(parents) + len(children)))
        parents += children
    return parents


def require_size(size: int) -> None:
    if size > MOST_NODES:
        raise UserError(f"the tree would have {size} nodes or more: at most {MOST_NODES} are allowed")


class StaticTree(TreePolicy):
    """Draw each node's children level by level into a fixed shape; nothing drawn is dropped, so q stays true."""

    growth = "static"

    def __init__(
        self,
        *,
        temperature: float,
        draw: str | None = None,
        parents: Sequence[int] | None = None,
        widths: Sequence[int] | None = None,
        preset: str | None = None,
        default_draw: str = "topk",
    ):
        self.draw = resolve_draw(draw, temperature, default_draw)
        self.law = law_of(self.draw)
        self.temperature = None if self.draw == "topk" else temperature
        if parents is not None and widths is not None:
            raise UserError("tree.parents and tree.widths say the same thing in two ways: give one of them")
        for name, value in (("parents", parents), ("widths", widths)):
            if value is not None and (not isinstance(value, list | tuple) or not value):
                raise UserError(f"tree.{name}={value}: use a list of whole numbers, e.g. {EXAMPLES[name]}")
        if parents is None and widths is not None:
            parents = parents_of_widths(widths)
        if parents is None and preset not in PRESETS:
            raise UserError(f"tree.preset={preset} is unknown: use one of {', '.join(PRESETS)}, or tree.widths=[4,2,1]")
        self.shape(list(parents) if parents is not None else parents_of(PRESETS[str(preset)]))

    def shape(self, parents: list[int]) -> None:
        require_size(len(parents))
        whole = all(type(parent) is int for parent in parents)
        if not whole or parents[:1] != [-1] or any(not 0 <= p < i for i, p in enumerate(parents) if i):
            raise UserError("tree.parents must start with -1 (the root) and name an earlier node for every other one")
        self.parents, self.size = parents, len(parents)
        depth = [0] * self.size
        children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents[1:], 1):
            depth[node] = depth[parent] + 1
            children[parent].append(node)
        self.children, self.node_depth = children, depth
        self.depth = max(depth)
        self.width = max(map(len, children))
        inner = [node for node in range(self.size) if children[node]]
        self.inner = [[node for node in inner if depth[node] == level] for level in range(self.depth)]

    def grow(self, step: Step, ask: Ask) -> Tree:
        if self.size == 1:
            return Tree.of_root(step)
        batch, device = step.root.shape[0], step.root.device
        growth = Growth(step, ask, self.depth)
        tokens = torch.zeros(batch, self.size, dtype=torch.long, device=device)
        tokens[:, 0] = step.root
        total = torch.zeros(batch, self.size, device=device)
        law: torch.Tensor | None = None
        slots: dict[int, int] = {}  # tree node -> draft slot
        for nodes in self.inner:
            if nodes == [0]:
                score, q = growth.root()
            else:
                parents = constant(tuple(slots[self.parents[node]] for node in nodes), device)
                score, q = growth.expand(parents.expand(batch, -1), tokens[:, constant(tuple(nodes), device)])
            slots |= {node: len(slots) + i for i, node in enumerate(nodes)}
            drawn, logp = growth.children(score, q, max(len(self.children[n]) for n in nodes), self.draw)
            for i, node in enumerate(nodes):
                kids, most = self.children[node], drawn.shape[-1]
                own = constant(tuple(kids[:most]), device)
                tokens[:, own] = drawn[:, i, : len(own)]
                total[:, own] = total[:, node, None] + logp[:, i, : len(own)]
                if len(kids) > most:  # more children than the vocabulary has
                    total[:, constant(tuple(kids[most:]), device)] = -torch.inf
            if q is not None:
                law = q.new_zeros(batch, self.size, q.shape[-1]) if law is None else law
                law[:, constant(tuple(nodes), device)] = q
        parent = constant(tuple(self.parents), device).expand(batch, -1)
        depth = constant(tuple(self.node_depth), device).expand(batch, -1)
        valid = total > -torch.inf
        return Tree(tokens, parent, depth, valid, total, self.law, self.growth, self.depth, law)


class Chain(StaticTree):
    """One branch, a chain of drafts. Drawn from q by default above temperature 0, where the rule of Leviathan et al. accepts
    most."""

    def __init__(self, *, depth: int, temperature: float, draw: str | None = None):
        positive(depth=depth)
        super().__init__(temperature=temperature, draw=draw, widths=[1] * depth, default_draw="iid")
