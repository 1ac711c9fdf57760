"""Simulated acceptance: an oracle drafts the target's own next tokens, as many as are asked for, so lengths are dictated.

It was told what plain decoding answers. The next L - 1 tokens of that go onto one path of the policy's tree, decoys everywhere
else; the real verifier judges, so the text stays the target's. What SGLang does by overwriting the verdict (its environment
variable SGLANG_SIMULATE_ACC_LEN, which counts the bonus as `length` does here), but per row, and on trees.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specresearch.kernels.graph import constant
from specresearch.kernels.tree import paths
from specresearch.types import Ask, Drafter, Frontier, Kept, Step, Target, Tree, TreePolicy, UserError

METHODS = ("match_expected", "bernoulli", "trace")
FIRST = 0.99  # of a decoy law's mass, for its first token: every policy then grows one path as deep as it may


class Simulated(Drafter):
    """Costs nothing itself, so a step's time is the target's, the policy's and the engine's.

    `match_expected`: floor or ceiling of `length`, so that any t steps of one answer emit t * length tokens, less than one
    more or fewer. `bernoulli`: the draft at depth j, if it is tried, is right with probability rates[j - 1]; `rates` = null:
    one rate for all depths, that of mean `length`. `trace`: the lengths of the same prompt's answer in an earlier run.
    Where a tree is too shallow, and at the end of an answer, less is emitted.
    """

    law = "point"

    def __init__(
        self,
        target: Target,
        *,
        length: float,
        method: str,
        rates: Sequence[float] | None = None,
        trace: str | None = None,
    ):
        if method not in METHODS:
            raise UserError(f"drafter.method={method} is unknown: use {', '.join(METHODS)}")
        if not _number(length):
            raise UserError(f"drafter.length={length}: use a number of tokens per step, the bonus included, e.g. 3.2")
        if rates is not None and (method != "bernoulli" or not _rates(rates)):
            raise UserError(
                f"drafter.rates={rates}: with drafter.method=bernoulli, the probability at each depth that a draft is right if "
                "those above it are, e.g. [0.8,0.6,0.5]"
            )
        if (trace is not None) != (method == "trace"):
            raise UserError("drafter.method=trace and drafter.trace=RUN_DIR go together: give both or neither")
        self.vocab_size, self.device = target.vocab_size, target.device
        self.length, self.method, self.rates = float(length), method, rates
        self.recorded = _lengths_of(Path(trace)) if trace is not None else {}
        recorded = max((n for own in self.recorded.values() for n in own.lengths), default=1)
        self.wanted = {"match_expected": self.length, "trace": recorded}.get(method, 1)  # most tokens of a step
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}
        rank = torch.arange(self.vocab_size, device=self.device).float()
        self.decoys = torch.where(rank == 0, math.log(FIRST), math.log(1 - FIRST) - rank * math.log(2))
        least = ", and a step emits 1 at least" if length < 1 and not trace and not rates else ""
        asked = f"lengths of {trace}" if trace else f"rates {rates}" if rates else f"length {length:g}{least}"
        self.simulated = f"accepted lengths were dictated, by {method} ({asked})"

    # -- what it knows -----------------------------------------------------------------------------------------------

    def foretell(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.answers[tuple(prompt)] = list(answer)

    def reserve(self, batch: int, capacity: int, slots: int) -> None:
        zeros = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.text = torch.full((batch, capacity + 1), -1, dtype=torch.long, device=self.device)  # prompt and answer
        self.count = zeros.clone()  # steps of the answer so far
        self.carry = zeros.double()  # of match_expected: what the steps so far lack of their mean, from 0 to 1
        self.planned = torch.zeros(batch, 0, dtype=torch.long, device=self.device)  # of trace

    def extend(self, rows: Sequence[int], tokens: Tensor, length: Tensor, features: Tensor | None) -> None:
        for row, ids, known in zip(rows, tokens.tolist(), length.tolist()):
            prompt = tuple(ids[:known])
            if not self.answers:
                raise UserError("drafter=simulated was not told what plain decoding answers: decode plainly first")
            # A next turn's prompt is new where the answer before it left the plain text (a near tie): nothing is known then.
            text = torch.tensor([*prompt, *self.answers.get(prompt, ())], device=self.device)[: self.text.shape[1]]
            self.text[row] = -1
            self.text[row, : len(text)] = text
            self.count[row] = 0
            if self.method == "trace":
                self._recall(row, prompt)

    def _recall(self, row: int, prompt: tuple[int, ...]) -> None:
        if prompt in self.answers and prompt not in self.recorded:
            raise UserError(
                "drafter.trace has no answer to this prompt: give a run over the same prompts, with the same target"
            )
        lengths, cut = self.recorded.get(prompt, Recorded([], False))
        if cut and 1 + sum(lengths) < len(self.answers.get(prompt, ())):
            raise UserError(
                f"drafter.trace ends after {1 + sum(lengths)} tokens of an answer that has {len(self.answers[prompt])} here: "
                "give a run with the same max_new_tokens"
            )
        lacking = max(0, len(lengths) + 1 - self.planned.shape[1])
        self.planned = torch.nn.functional.pad(self.planned, (0, lacking), value=1)
        self.planned[row] = 1  # behind the end of the recording
        self.planned[row, : len(lengths)] = torch.tensor(lengths, dtype=torch.long, device=self.device)

    def kept(self) -> Kept:
        return Kept((self,))

    # -- one step ----------------------------------------------------------------------------------------------------

    def expand(self, frontier: Frontier) -> Tensor:
        """One law for every node; its tokens are replaced when the tree stands."""
        return self.decoys.expand(*frontier.tokens.shape, -1)

    def propose(self, step: Step, policy: TreePolicy, ask: Ask) -> Tree:
        self._say_what_fits(policy)
        tree = policy.grow(step, ask)
        if tree.tokens.shape[1] == 1:
            return tree
        line = _deepest(tree)  # [B, D+1]
        most = (line >= 0).sum(1)  # tokens that this tree can emit, the bonus included
        length = self._lengths(step, most, tree.levels)
        self.count += step.live
        tokens = placed(tree, line, self._ahead(step, tree.levels + 1), length, self.vocab_size)
        return Tree(tokens, tree.parent, tree.depth, tree.valid, tree.score, "point", tree.growth, tree.levels)

    def _say_what_fits(self, policy: TreePolicy) -> None:
        """In what the results are marked with: lengths that no tree of this policy can hold are cut."""
        said = f"; a tree of depth {policy.depth} emits {policy.depth + 1} at most"
        if self.wanted > policy.depth + 1 and self.simulated is not None and said not in self.simulated:
            self.simulated += said

    def _ahead(self, step: Step, count: int) -> Tensor:
        """The next `count` tokens of the answer [B, count]; -1 beyond its end, and where the text has left it (near ties)."""
        width = self.text.shape[1]
        place = torch.arange(width, device=self.device)
        agrees = ((step.tokens[:, :width] == self.text) | (place > step.length[:, None])).all(1)
        at = step.length[:, None] + 1 + torch.arange(count, device=self.device)
        known = torch.where(at < width, self.text.gather(1, at.clamp(max=width - 1)), -1)
        return torch.where(agrees[:, None], known, -1)

    def _lengths(self, step: Step, most: Tensor, levels: int) -> Tensor:
        """Tokens to emit in this step [B], from 1 to `most` [B]."""
        if self.method == "match_expected":
            return self._matched(step, most)
        if self.method == "bernoulli":
            return torch.minimum(self._tried(step, levels), most)
        at = self.count.clamp(max=self.planned.shape[1] - 1)[:, None]
        return torch.minimum(self.planned.gather(1, at)[:, 0], most)

    def _matched(self, step: Step, most: Tensor) -> Tensor:
        """Systematic sampling: a random phase for each answer, then what is lacking is carried over, so every step's law is
        floor or ceiling with the right mean and the sums stay within one token of theirs."""
        phase = (step.row_id.double() + 0.5) / (1 << 31)
        wanted = torch.minimum(most.double(), most.new_full((), 1).double().clamp(min=self.length))
        due = torch.where(self.count == 0, phase, self.carry) + wanted
        length = due.floor()
        self.carry = torch.where(step.live, due - length, self.carry)
        return length.long()

    def _tried(self, step: Step, levels: int) -> Tensor:
        rates = list(self.rates) if self.rates is not None else [rate_of(self.length, levels)] * levels
        right = constant(tuple((rates + [0.0] * levels)[:levels]), self.device, torch.float64)
        law = torch.stack([1 - right, right], -1).expand(step.root.shape[0], -1, -1)  # [B, D, 2]
        return 1 + step.rng.draw(law, 0).cumprod(1).sum(1)


def placed(tree: Tree, line: Tensor, ahead: Tensor, length: Tensor, vocab: int) -> Tensor:
    """Tokens [B, N] of `tree` such that a greedy verifier emits `length` [B], if `ahead` [B, D+1] is what the target says.

    The first length - 1 of `ahead` stand on `line` [B, D+1]. A decoy is none of its siblings, and not what the target says.
    """
    batch, nodes = tree.parent.shape
    spare = torch.where(line >= 0, line, nodes)
    next_true = torch.full((batch, nodes + 1), -1, device=line.device).scatter_(1, spare, ahead)[:, :nodes]
    parent = tree.parent.clamp(min=0)
    truth = next_true.gather(1, parent)  # what the target says after each node's parent; -1 = unknown
    before = torch.ones(nodes, nodes, dtype=torch.bool, device=line.device).tril(-1)
    rank = ((tree.parent[:, :, None] == tree.parent[:, None]) & before & tree.valid[:, None]).sum(-1)
    tokens = (truth + 1 + rank) % vocab
    right = torch.zeros(batch, nodes + 1, dtype=torch.bool, device=line.device)
    place = torch.arange(line.shape[1], device=line.device)
    right = right.scatter_(1, spare, (place > 0) & (place < length[:, None]))[:, :nodes]
    tokens = torch.where(right & (truth >= 0), truth, tokens)
    tokens = torch.where(tree.valid, tokens, tree.tokens)
    return torch.cat([tree.tokens[:, :1], tokens[:, 1:]], 1)


def _deepest(tree: Tree) -> Tensor:
    """The path to the first of the deepest nodes, root first, [B, D+1], -1 padded."""
    deepest = torch.where(tree.valid, tree.depth, -1).argmax(1)
    return paths(tree.parent, tree.levels)[torch.arange(len(deepest), device=deepest.device), deepest]


def rate_of(length: float, levels: int) -> float:
    """The probability r for which 1 + r + r^2 + ... + r^levels = length; 0 or 1 where there is none."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**j for j in range(levels + 1)) < length else (low, rate)
    return high if length > 1 else 0.0


class Recorded(NamedTuple):
    """Of an answer in an earlier run."""

    lengths: list[int]  # accepted, step by step
    cut: bool  # by its budget


def _lengths_of(path: Path) -> dict[tuple[int, ...], Recorded]:
    """By prompt, from the trace of an earlier run. Raises UserError."""
    file = path / "trace.jsonl" if path.is_dir() else path
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
        return {
            tuple(line["prompt_ids"]): Recorded([int(s["emitted"]) for s in line["steps"]], line["finish"] == "length")
            for line in lines
        }
    except OSError as error:
        raise UserError(f"drafter.trace={path} cannot be read ({error.strerror}): give the folder of a run") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"drafter.trace={path} is no trace: give the folder of a run, or its trace.jsonl") from None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _rates(rates: object) -> bool:
    return isinstance(rates, list | tuple) and all(x == 0 or (_number(x) and x <= 1) for x in rates) and bool(rates)
