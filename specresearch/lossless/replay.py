"""One step of speculation told again as events: what each draft, coin and last token exceeded its mean by, given the past.

The arithmetic is this file's own, in float64, from the rules as the papers state them (Leviathan et al., arXiv:2211.17192;
SpecInfer, arXiv:2305.09781; Sequoia, arXiv:2402.12374; EAGLE-2, arXiv:2406.16858). Legend: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specresearch.lossless.scores import mid_pit, mid_rank, surprisal, top
from specresearch.types import Probs, Tree, Verdict

ROUNDING = 1e-4  # relative: what float32 may decide the other way is no proof


class Event(NamedTuple):
    name: str  # of the claim
    excess: tuple[float, ...]
    variance: tuple[float, ...]
    impossible: bool = False


class Residual:
    """What is left of p [1, V] at one node while its children are rejected. q None: each child is a point mass."""

    def __init__(self, p: Tensor, q: Tensor | None, without_replacement: bool):
        self.left, self.q, self.without_replacement = p, q, without_replacement
        self.dead = p == 0  # tokens that certainly cannot come any more

    def chance(self, x: int) -> float:
        """Of accepting x; above 1 if nothing is left to chance."""
        share = self.left.sum() if self.q is None else self.q[0, x]
        return float(self.left[0, x] / share) if share > 0 else 0.0

    def reject(self, x: int) -> None:
        if self.q is None:
            self.left, self.dead = _cut(self.left, x, 0.0), _cut(self.dead, x, True)
            return
        if not self.q[0, x] > 0:
            return  # q cannot draw it: such a child is passed over
        rest = (self.left - self.q).clamp(min=0)
        if (mass := rest.sum()) > 0:
            self.dead = self.dead | (self.left < self.q * (1 - ROUNDING))
            self.left = rest / mass
        if self.without_replacement:
            self.q = next_sibling(self.q, x)

    def noise(self, x: int) -> float:
        """Where about the uniform lay that drew the draft x, in -1/2 .. 1/2; 0 if unknown."""
        return 0.0 if self.q is None else float(mid_pit(self.q, torch.tensor([[x]]))[0])


def next_sibling(q: Tensor, x: int) -> Tensor:
    """q [1, V] without x"""
    rest = _cut(q, x, 0.0)
    return rest / rest.sum().clamp(min=torch.finfo(q.dtype).tiny)


def _cut(weights: Tensor, x: int, value: float | bool) -> Tensor:
    return weights.index_fill(1, torch.tensor([x]), value)


class Replay:
    """`point`: every child is judged as a point mass, whatever law it was drawn by."""

    def __init__(self, tree: Tree, p: Probs, verdict: Verdict, point: bool):
        self.tree, self.drawn = tree, tree.q is not None and tree.law != "point"
        self.by_q = self.drawn and not point
        self.without_replacement = tree.law == "without_replacement"
        self.tokens, self.path, self.next = (x.tolist() for x in (tree.tokens, verdict.path, verdict.next_token))
        levels = verdict.path.shape[1]
        self.p = [p(verdict.path[:, level].clamp(min=0)) for level in range(levels)]  # [B, V] after each accepted node
        self.children = [_children(*row) for row in zip(tree.parent.tolist(), tree.valid.tolist())]

    def row(self, row: int) -> Iterator[Event]:
        if self.next[row] < 0:
            return  # p was no law; the loop says so
        if self.drawn:
            for node, children in self.children[row].items():
                yield from self._drafts(row, node, children)
        path = [node for node in self.path[row] if node >= 0]
        for level, (node, accepted) in enumerate(zip(path, [*path[1:], -1])):
            q = self._q(row, node) if self.by_q else None
            residual = Residual(self.p[level][row].cpu().double()[None], q, self.without_replacement)
            yield from self._node(row, residual, self.children[row].get(node, []), accepted)

    def _q(self, row: int, node: int) -> Tensor:
        assert self.tree.q is not None
        return self.tree.q[row, node].cpu().double()[None]

    def _drafts(self, row: int, node: int, children: list[int]) -> Iterator[Event]:
        q = self._q(row, node)
        for child in children:
            x = self.tokens[row][child]
            scored = [surprisal(q, _at(x)), top(q, _at(x))]
            # The first child alone, too: siblings that were put into another order differ from their law in opposite ways.
            scored += [scored[0]] if child == children[0] else [(torch.zeros(1), torch.zeros(1))]
            yield _event("drafts", scored, not q[0, x] > 0)
            q = next_sibling(q, x) if self.without_replacement else q

    def _node(self, row: int, residual: Residual, children: list[int], accepted: int) -> Iterator[Event]:
        """The children in the order in which they were tried; if none was accepted, the token that ended the step."""
        noise = 0.0
        for child in children:
            x = self.tokens[row][child]
            chance, noise = residual.chance(x), residual.noise(x)
            yield from _coin(child == accepted, chance, noise)
            if child == accepted:
                return
            residual.reject(x)
        left, y = residual.left, _at(self.next[row])
        if not left.sum() > 0:
            return  # the children had all mass, and rounding rejected the last of them
        left = left / left.sum()
        name = "residual" if children else "bonus"
        yield _event(name, [mid_rank(left, y), surprisal(left, y)], bool(residual.dead[0, y[0, 0]]))
        if noise:
            place, variance = (float(x) for x in mid_pit(left, y))
            yield Event("independence", (0.0, 8 * noise * place), (0.0, (8 * noise) ** 2 * variance))


def _children(parents: list[int], valid: list[bool]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if node and valid[node]:
            found.setdefault(parent, []).append(node)
    return found


def _at(token: int) -> Tensor:
    return torch.tensor([[token]])


def _event(name: str, scored: list[tuple[Tensor, Tensor]], impossible: bool) -> Event:
    excess, variance = ([float(part[i]) for part in scored] for i in (0, 1))
    return Event(name, tuple(excess), tuple(max(v, 0.0) for v in variance), impossible)


def _coin(accepted: bool, chance: float, noise: float) -> Iterator[Event]:
    a = min(chance, 1.0)
    certain = chance >= 1 + ROUNDING or (chance >= 1 and not noise)
    yield Event("coins", (accepted - a,), (a * (1 - a),), a == 0 if accepted else certain)
    if noise:
        # Scaled to at most 2, which bets can bear: what little such scores move shows sooner.
        yield Event("independence", (4 * noise * (accepted - a), 0.0), ((4 * noise) ** 2 * a * (1 - a), 0.0))
