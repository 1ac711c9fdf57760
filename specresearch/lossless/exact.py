"""The exact law of one step, by enumerating every random outcome of the shipped code on a small vocabulary.

A step emits a block of random length, so its *completed* law is compared: blocks are continued with draws from p up to a
fixed horizon, and the law over all sequences of that length must be p's own. Equality for every step, with fresh
randomness and drafts that depend on the past alone, gives equality for whole answers by induction.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from specresearch.kernels.tree import node_paths
from specresearch.types import Frontier, Step, Tree, TreePolicy, Verdict, Verifier

Script = tuple[int, ...]


class Enumerator:
    """An `Rng` whose every call branches. Each batch row replays one script of choices; where a script ends, the row takes
    the first possible outcome and the others are noted in `untried`.

    A coin is an interval of uniforms not yet excluded: asked again with another threshold, it splits what is left.
    """

    def __init__(self, scripts: list[Script]):
        self.scripts = [list(script) for script in scripts]
        self.taken: list[list[int]] = [[] for _ in scripts]
        self.weight = [1.0] * len(scripts)
        self.coins: list[dict[int, tuple[float, float]]] = [{} for _ in scripts]
        self.untried: list[Script] = []

    def _choose(self, row: int, chances: list[float]) -> int:
        """One of the outcomes of positive chance."""
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        at = len(self.taken[row])
        if at < len(self.scripts[row]):
            choice = self.scripts[row][at]
        else:
            choice = possible[0]
            self.untried += [(*self.taken[row], other) for other in possible[1:]]
        self.taken[row].append(choice)
        self.weight[row] *= chances[choice]
        return choice

    def accept(self, coin_id: Tensor | int, threshold: Tensor) -> Tensor:
        ids = torch.as_tensor(coin_id).expand(threshold.shape[0]).tolist()
        return torch.tensor([self._below(row, ids[row], t) for row, t in enumerate(threshold.tolist())])

    def _below(self, row: int, coin: int, threshold: float) -> bool:
        low, high = self.coins[row].get(coin, (0.0, 1.0))
        if not threshold > low:
            return False
        if threshold >= high:
            return True
        share = (threshold - low) / (high - low)
        below = self._choose(row, [share, 1 - share]) == 0
        self.coins[row][coin] = (low, threshold) if below else (threshold, high)
        return below

    def pick(self, weights: Tensor) -> Tensor:
        return torch.tensor([self._categorical(row, w) for row, w in enumerate(weights.tolist())])

    def draw(self, weights: Tensor, slot: int) -> Tensor:
        return torch.tensor([[self._categorical(row, w) for w in line] for row, line in enumerate(weights.tolist())])

    def uniforms(self, nodes: int) -> None:
        """There are none: every outcome is taken."""

    def _categorical(self, row: int, weights: list[float]) -> int:
        total = sum(weights)
        return self._choose(row, [w / total for w in weights]) if total > 0 else -1


class Table:
    """A law for every prefix of up to `horizon` tokens: `laws` [(V+1)^horizon, V], indexed by the prefix in base V+1."""

    def __init__(self, laws: Tensor, vocab: int, horizon: int):
        self.laws, self.vocab, self.horizon = laws, vocab, horizon

    @staticmethod
    def random(vocab: int, horizon: int, generator: torch.Generator, zeros: float = 0.0) -> Table:
        """Dirichlet(1) rows in float64; each entry is 0 with probability `zeros`, though never a whole row."""
        weights = -torch.rand((vocab + 1) ** horizon, vocab, generator=generator, dtype=torch.float64).log()
        dead = torch.rand(weights.shape, generator=generator) < zeros
        dead[torch.arange(len(dead)), torch.randint(vocab, (len(dead),), generator=generator)] = False
        weights = weights.masked_fill(dead, 0.0)
        return Table(weights / weights.sum(-1, keepdim=True), vocab, horizon)

    def __call__(self, path: Tensor) -> Tensor:
        """path [..., D], -1 padded -> laws [..., V]"""
        base = (self.vocab + 1) ** torch.arange(path.shape[-1])
        return self.laws[((path + 1) * base).sum(-1) % len(self.laws)]

    def of(self, prefix: tuple[int, ...]) -> Tensor:
        return self(torch.tensor(prefix, dtype=torch.long))

    def sequence_law(self, prefix: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
        """The law of the next `length` tokens after `prefix`."""
        laws = {prefix: 1.0}
        for _ in range(length):
            laws = {(*s, x): w * float(self.of(s)[x]) for s, w in laws.items() for x in range(self.vocab)}
        return laws


class TableProbs:
    """p of a tree's nodes from a table."""

    def __init__(self, tree: Tree, table: Table):
        self.p = table(node_paths(tree.parent, tree.tokens, max(tree.levels, 1)))

    def __call__(self, node: Tensor) -> Tensor:
        return self.p[torch.arange(len(node)), node]

    def all(self) -> Tensor:
        return self.p


def completed_law(policy: TreePolicy, verifier: Verifier, p: Table, q: Table, batch: int = 4096) -> Tensor:
    """The law [V, V, ...] of the first depth + 1 tokens when one step of speculation is continued with draws from p."""
    horizon = policy.depth + 1
    law = torch.zeros((p.vocab,) * horizon, dtype=torch.float64)
    pending: list[Script] = [()]
    while pending:
        now, pending = pending[-batch:], pending[:-batch]
        rng = Enumerator(now)
        tree, verdict = _step(policy, verifier, p, q, rng)
        pending += rng.untried
        nodes = verdict.path[:, 1:].clamp(min=0)
        drafted = tree.tokens.gather(1, nodes).tolist()
        for row, weight in enumerate(rng.weight):
            count = int(verdict.length[row])
            block = (*drafted[row][: count - 1], int(verdict.next_token[row]))
            if block[-1] < 0:
                raise ArithmeticError(f"the rule drew from an empty or NaN residual after {block[:-1]}")
            for sequence, rest in p.sequence_law(block, horizon - count).items():
                law[sequence] += weight * rest
    return law


def _step(policy: TreePolicy, verifier: Verifier, p: Table, q: Table, rng: Enumerator) -> tuple[Tree, Verdict]:
    rows = len(rng.weight)
    zero = torch.zeros(rows, dtype=torch.long)
    step = Step(zero, zero, zero, zero == 0, zero + 99, zero[:, None], rng, extent=0)

    def ask(frontier: Frontier) -> tuple[Tensor, Tensor | None]:
        law = q(frontier.path)
        return law.log().float(), None if policy.temperature is None else law

    tree = policy.grow(step, ask)
    return tree, verifier.verify(tree, TableProbs(tree, p), rng)


def total_variation(law: Tensor, p: Table) -> float:
    """Half the absolute difference between `law` and p's own law over all sequences of that length."""
    own = p.sequence_law((), law.dim())
    return 0.5 * sum(abs(float(law[s]) - own[s]) for s in product(range(p.vocab), repeat=law.dim()))
