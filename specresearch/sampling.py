"""Processors and warp: the only home of temperature and truncation, shared by p, q, the baseline and the checks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specresearch.kernels.graph import constant
from specresearch.kernels.mask import unpack
from specresearch.kernels.sampling import largest, raise_half, warp
from specresearch.kernels.tree import node_paths
from specresearch.types import Frontier, Grammar, Step, Tree, UserError

EDGE = 1e-3  # how far rounding may move the edge of a truncation


class Sampler:
    """How a run turns logits into laws. `process` depends on the path (penalties, grammar); the warp does not.

    `grammar` is carried for those who make the masks that `process` applies.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        grammar: Grammar | None = None,
    ):
        for name, value, good, say in (
            (
                "temperature",
                temperature,
                lambda x: x == 0 or 1e-6 <= x <= 1e6,
                "0 (greedy) or a number from 1e-6 to 1e6",
            ),
            ("top_k", top_k, lambda x: isinstance(x, int) and x >= 0, "0 (off) or a positive whole number"),
            ("top_p", top_p, lambda x: 0 < x <= 1, "a number above 0 and up to 1 (1 = off)"),
            ("min_p", min_p, lambda x: 0 <= x <= 1, "a number from 0 (off) to 1"),
            (
                "repetition_penalty",
                repetition_penalty,
                lambda x: 0.01 <= x <= 100,
                "a number from 0.01 to 100 (1 = off)",
            ),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or not good(value):
                raise UserError(f"{name}={value}: use {say}")
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self.repetition_penalty, self.grammar = repetition_penalty, grammar
        # `logit_bias.11=-5` on the command line makes a text of the key.
        given: Any = logit_bias if isinstance(logit_bias, Mapping) else {"": logit_bias} if logit_bias else {}
        bias: dict[Any, Any] = {int(k) if str(k).isdigit() else k: v for k, v in given.items()}
        if not all(type(k) is int and isinstance(v, int | float) and abs(v) <= 1e4 for k, v in bias.items()):
            raise UserError(f"logit_bias={logit_bias}: use token ids and finite numbers, e.g. 'logit_bias={{11:-5}}'")
        self.logit_bias: dict[int, float] = bias

    @property
    def path_dependent(self) -> bool:
        return self.repetition_penalty != 1

    def warp(self, logits: Tensor, temperature: float | None = None) -> Tensor:
        heat = self.temperature if temperature is None else temperature
        return warp(logits, heat, self.top_k, self.top_p, self.min_p)

    def loosened(self) -> Sampler:
        """The same with truncations that let in what rounding may have let in: the token at the edge."""
        return Sampler(
            temperature=self.temperature,
            top_k=self.top_k + 1 if self.top_k else 0,
            top_p=min(1.0, self.top_p + EDGE),
            min_p=self.min_p * (1 - EDGE),
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            grammar=self.grammar,
        )

    def process(
        self, logits: Tensor, tokens: Tensor, known: Tensor, path: Tensor | None = None, allow: Tensor | None = None
    ) -> Tensor:
        """Logit bias, then repetition penalty, then the grammar. Logits [B, W, V]; history `tokens` [B, T] of which the first
        `known` [B] count; `path` [B, W, D] = further tokens of each node, -1 padded (needed only if `path_dependent`);
        `allow` int32 [B, W, ceil(V/32)] = the tokens that the grammar lets follow each, None: all."""
        logits = raise_half(logits)  # first, as `generate` does: a penalty rounded to bfloat16 makes ties
        if self.logit_bias:
            ids = constant(tuple(self.logit_bias), logits.device)
            if not 0 <= min(self.logit_bias) <= max(self.logit_bias) < logits.shape[-1]:
                raise UserError(f"logit_bias has token ids outside the vocabulary of {logits.shape[-1]}")
            bias = constant(tuple(self.logit_bias.values()), logits.device, logits.dtype)
            logits = logits.index_add(-1, ids, bias.expand(*logits.shape[:-1], -1))
        if self.path_dependent:
            seen = self._seen(logits, tokens, known, path)
            penalised = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
            logits = torch.where(seen, penalised, logits)
        return logits if allow is None else forbid(logits, allow)

    def _seen(self, logits: Tensor, tokens: Tensor, known: Tensor, path: Tensor | None) -> Tensor:
        batch, width, vocab = logits.shape
        used = torch.arange(tokens.shape[1], device=tokens.device) < known[:, None]
        ids = torch.where(used, tokens, vocab)[:, None].expand(batch, width, -1)
        if path is not None:
            ids = torch.cat([ids, torch.where(path >= 0, path, vocab)], -1)
        seen = torch.zeros(batch, width, vocab + 1, dtype=torch.bool, device=logits.device)
        return seen.scatter_(-1, ids, True)[..., :vocab]

    def draft(
        self, logits: Tensor, frontier: Frontier, temperature: float | None, allow: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Raw draft logits [B, W, V] -> growth score (fp32 log-softmax after the processors alone) and the warped q."""
        step = frontier.step
        logits = self.process(logits, step.tokens, step.length + 1, frontier.path, allow)
        score = logits.float().log_softmax(-1).nan_to_num_(-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        if temperature is None:
            return score, None
        silent = (logits == -torch.inf).all(-1, keepdim=True)  # of such a row the softmax is NaN
        return score, self.warp(logits, temperature).masked_fill(silent, 0.0)

    def probs(self, logits: Tensor, step: Step, tree: Tree) -> TreeProbs:
        return TreeProbs(self, logits, step, tree)


def forbid(logits: Tensor, allow: Tensor) -> Tensor:
    """-inf for the tokens whose bit in `allow` [..., ceil(V/32)] is 0. Logits [..., V]"""
    return logits.masked_fill(~unpack(allow, logits.shape[-1]), -torch.inf)


class TreeProbs:
    """p at the nodes of one tree, made row by row as a verifier asks, since most nodes are never visited."""

    def __init__(self, sampler: Sampler, logits: Tensor, step: Step, tree: Tree):
        self.sampler, self.logits, self.step = sampler, logits, step
        self.path = node_paths(tree.parent, tree.tokens, tree.levels) if sampler.path_dependent else None
        self.allow = tree.allow

    @cached_property
    def rows(self) -> Tensor:
        return torch.arange(self.logits.shape[0], device=self.logits.device)

    @property
    def one_hot(self) -> bool:
        return self.sampler.temperature == 0

    def choices(self) -> Tensor:
        """Where p is one-hot: the token that has it all, at every node [B, N]; -1 where the logits give no law."""
        top, token = largest(self._processed(self.logits, self.path, self.allow), 1)
        return torch.where(top.abs() < torch.inf, token, -1)[..., 0]

    def __call__(self, node: Tensor) -> Tensor:
        path, allow = (None if x is None else x[self.rows, node][:, None] for x in (self.path, self.allow))
        return self.sampler.warp(self._processed(self.logits[self.rows, node][:, None], path, allow))[:, 0]

    def all(self) -> Tensor:
        return self.sampler.warp(self._processed(self.logits, self.path, self.allow))

    def _processed(self, logits: Tensor, path: Tensor | None, allow: Tensor | None) -> Tensor:
        return self.sampler.process(logits, self.step.tokens, self.step.length + 1, path, allow)
