"""What all tree policies share: asking the drafter about nodes, and choosing children from its answer."""

from __future__ import annotations

import torch
from torch import Tensor

from specresearch.kernels.sampling import largest
from specresearch.types import Ask, Frontier, Law, Step, UserError

MOST_NODES = 1024  # of a tree, so that a slip of the pen does not fill the memory
DRAWS = ("topk", "without_replacement", "iid")


def resolve_draw(draw: str | None, temperature: float, default: str) -> str:
    """How children are chosen; at temperature 0 a draw could only ever give the first choice, so it becomes top-k."""
    if draw is not None and draw not in DRAWS:
        raise UserError(f"tree.draw={draw} is unknown: use one of {', '.join(DRAWS)}")
    if not isinstance(temperature, int | float) or not (temperature == 0 or 1e-6 <= temperature <= 1e6):
        raise UserError(f"tree.temperature={temperature}: use 0 or a number from 1e-6 to 1e6")
    return "topk" if temperature == 0 else draw or default


def law_of(draw: str) -> Law:
    return "point" if draw == "topk" else draw  # type: ignore[return-value]


def positive(**values: int) -> None:
    for name, value in values.items():
        if type(value) is not int or not 1 <= value <= MOST_NODES:
            raise UserError(f"tree.{name}={value}: use a whole number from 1 to {MOST_NODES}")


class Growth:
    """The nodes asked about so far in one step. Draft slot = order of asking; the root is slot 0."""

    def __init__(self, step: Step, ask: Ask, depth: int):
        self.step, self.ask, self.draws = step, ask, 0
        batch, device = step.root.shape[0], step.root.device
        self.depth = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.ancestors = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
        self.path = torch.full((batch, 1, depth), -1, dtype=torch.long, device=device)

    def root(self) -> tuple[Tensor, Tensor | None]:
        """-> score [B, 1, V], q [B, 1, V] or None of the root's children"""
        root = self.step.root[:, None]
        return self.ask(Frontier(self.step, root, torch.full_like(root, -1), self.ancestors, self.path, self.depth, 0))

    def expand(self, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ask about new nodes: draft slots of their parents [B, W] and their tokens [B, W] -> score, q [B, W, V]."""
        batch, width = tokens.shape
        start = self.depth.shape[1]
        depth = self.depth.gather(1, parents) + 1
        path = self.path.gather(1, parents[..., None].expand(-1, -1, self.path.shape[-1]))
        path = path.scatter(-1, depth[..., None] - 1, tokens[..., None])
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        inherited = self.ancestors.gather(1, parents[..., None].expand(-1, -1, start))
        ancestors = torch.cat([inherited, own], -1)
        self.depth = torch.cat([self.depth, depth], 1)
        self.path = torch.cat([self.path, path], 1)
        self.ancestors = torch.cat([torch.nn.functional.pad(self.ancestors, (0, width)), ancestors], 1)
        return self.ask(Frontier(self.step, tokens, parents, ancestors, path, depth, start))

    def children(self, score: Tensor, q: Tensor | None, count: int, draw: str) -> tuple[Tensor, Tensor]:
        """Choose `count` children per node from score, q [B, W, V] -> tokens, log-probabilities [B, W, count].

        A child that does not exist (nothing proposed, q exhausted) has log-probability -inf and token 0.
        """
        count = min(count, score.shape[-1])
        if draw == "topk":
            logp, tokens = largest(score, count)
            return torch.where(logp > -torch.inf, tokens, 0), logp
        assert q is not None
        tokens = self._draw(q, count, draw == "without_replacement")
        logp = score.gather(-1, tokens.clamp(min=0))
        return tokens.clamp(min=0), torch.where(tokens >= 0, logp, -torch.inf)

    def _draw(self, q: Tensor, count: int, without_replacement: bool) -> Tensor:
        drawn = []
        for _ in range(count):
            token = self.step.rng.draw(q, self.draws)
            self.draws += 1
            drawn.append(token)
            if without_replacement:
                q = q.scatter(-1, token.clamp(min=0)[..., None], 0.0)
        return torch.stack(drawn, -1)
