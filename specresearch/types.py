"""The vocabulary: records that flow through one step, and the roles that exchange them.

Legend: B batch rows, N tree nodes (root counted), D drafted levels, W frontier width, M draft slots asked so far,
V vocabulary, T history, F feature width. p = target law, q = draft law. -1 means "none" in every index tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Law = Literal["point", "without_replacement", "iid"]
Growth = Literal["static", "predictable", "pruned_after_reveal"]
Tap = int | Literal["norm"]

LAWS: tuple[Law, ...] = ("point", "without_replacement", "iid")
GROWTHS: tuple[Growth, ...] = ("static", "predictable", "pruned_after_reveal")


class UserError(ValueError):
    """A mistake that the user can mend. The message is one line: what is wrong and what to write instead."""


class Rng(Protocol):
    """The only source of chance for verifiers and tree policies, so that proofs can enumerate it.

    Two calls of `accept` with the same `coin_id` in one step see the same uniform.
    """

    def accept(self, coin_id: Tensor | int, threshold: Tensor) -> Tensor:
        """True with probability `threshold` [B] (strictly: uniform < threshold; NaN is never accepted) -> bool [B]."""
        ...

    def pick(self, weights: Tensor) -> Tensor:
        """Draw an index in proportion to `weights` [B, V] (not normalised) -> [B]; -1 where they are NaN or all 0."""
        ...

    def draw(self, weights: Tensor, slot: int) -> Tensor:
        """Draw draft tokens from `weights` [B, W, V] -> [B, W], -1 where a row is all 0; `slot` is one per call."""
        ...

    def uniforms(self, nodes: int) -> tuple[Tensor, Tensor] | None:
        """For kernels that take uniforms: those of coins 0 .. nodes-1 [B, nodes] and of the next `pick` [B]; None where
        chance is enumerated and the torch reference must run."""
        ...


@dataclass(frozen=True)
class Step:
    """What the parts may know of the batch at the start of one step."""

    root: Tensor  # [B] newest emitted token, in no cache yet
    row_id: Tensor  # [B] number of the turn that occupies the row
    length: Tensor  # [B] tokens in cache
    live: Tensor  # [B] bool
    budget: Tensor  # [B] tokens that may still be emitted
    tokens: Tensor  # [B, T] history; the root stands at index `length`
    rng: Rng
    extent: int  # largest `length`, known to the host, so that no part has to ask the device


@dataclass(frozen=True)
class Frontier:
    """Nodes whose next-token law is asked for. Draft slot m is the m-th node ever asked in this step; slot 0 is the root.

    Shapes are fixed, so some nodes may be dead (nothing was proposed there): their token is 0, and answers go unread.
    """

    step: Step
    tokens: Tensor  # [B, W]
    parents: Tensor  # [B, W] draft slot of each node's parent, -1 for the root
    ancestors: Tensor  # [B, W, M] bool over draft slots, the node itself included; M = start + W
    path: Tensor  # [B, W, D] tokens from below the root down to the node itself, -1 padded at the end
    depth: Tensor  # [B, W] 0 for the root
    start: int  # draft slot of the first of these nodes


@dataclass(frozen=True)
class Tree:
    """Node 0 is the root; a parent comes before its children; siblings stand in the order in which they are tried."""

    tokens: Tensor  # [B, N]
    parent: Tensor  # [B, N], -1 for the root
    depth: Tensor  # [B, N]
    valid: Tensor  # [B, N] bool; pads are False and never candidates
    score: Tensor  # [B, N] fp32, cumulative draft log-probability
    law: Law
    growth: Growth
    levels: int  # no node is deeper than this
    q: Tensor | None = None  # [B, N, V]; q[:, i] = the law that node i's children were drawn from
    allow: Tensor | None = None  # int32 [B, N, ceil(V/32)]; a bit a token: it may follow the node; None: all may

    @staticmethod
    def of_root(step: Step) -> Tree:
        """The size-1 tree: nothing is proposed, the step is one of plain decoding."""
        root = step.root[:, None]
        zero = torch.zeros_like(root)
        return Tree(root, zero - 1, zero, torch.ones_like(root, dtype=torch.bool), zero.float(), "point", "static", 0)

    def trim(self) -> Tree:
        """Cut the pads behind the last node that any row uses, to a power of two. Reads one number from the device."""
        number = torch.arange(1, self.valid.shape[1] + 1, device=self.valid.device)
        used = int((self.valid * number).max())
        size = min(self.valid.shape[1], 1 << (used - 1).bit_length())
        tokens, parent, depth, valid, score = (
            x[:, :size] for x in (self.tokens, self.parent, self.depth, self.valid, self.score)
        )
        q, allow = (None if x is None else x[:, :size] for x in (self.q, self.allow))
        levels = min(self.levels, size - 1)
        return Tree(tokens, parent, depth, valid, score, self.law, self.growth, levels, q, allow)


@dataclass(frozen=True)
class TargetOutput:
    logits: Tensor  # [B, N, V]
    features: Tensor | None = None  # [B, N, F]; a drafter may hold on to them


@dataclass(frozen=True)
class Verdict:
    path: Tensor  # [B, D+1] accepted nodes, root first, -1 padded
    length: Tensor  # [B] tokens emitted = nodes to commit
    next_token: Tensor  # [B] the last token emitted; -1 where p was not a distribution


Ask = Callable[[Frontier], tuple[Tensor, Tensor | None]]  # -> score [B, W, V] fp32, q [B, W, V] or None


class Probs(Protocol):
    """p at the nodes of a tree: processed and warped exactly as plain decoding would."""

    def __call__(self, node: Tensor) -> Tensor:
        """node [B] -> [B, V]"""
        ...

    def all(self) -> Tensor:
        """-> [B, N, V]"""
        ...


class Matcher(Protocol):
    """Where one answer stands in a grammar. `terminated`: EOS was accepted, and nothing can follow."""

    terminated: bool

    def accept(self, token: int) -> bool:
        """Go on by `token`; False, and nothing changes, where the grammar forbids it."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ...

    def fill(self, allow: Tensor, row: int) -> None:
        """Write the tokens that may follow into `allow[row]`, int32 [n, ceil(V/32)] on the CPU. Not when `terminated`."""
        ...


class Grammar(Protocol):
    """A grammar in the tokens of one target. EOS is allowed where an answer may end, and nowhere else."""

    vocab_size: int
    eos: tuple[int, ...]
    device: torch.device  # where masks are wanted
    origin: str  # tells it from others
    kind: str
    draft: bool  # drafts are to follow it, too

    def matcher(self) -> Matcher:
        """At the start of an answer."""
        ...


@dataclass(frozen=True)
class Kept:
    """What a part keeps from one step to the next, if all of it is on the device and a step asks for none of it."""

    state: tuple[
        object, ...
    ] = ()  # whose attributes hold it: tensors, that a step may write to or put others in place of
    fixed: tuple[
        object, ...
    ] = ()  # where a step reads and writes besides (caches, weights), as long as they are the same


class TreePolicy:
    """Decides which branches to ask the drafter about. `law` and `growth` carry the correctness of the acceptance rule."""

    size: int  # nodes, root counted
    depth: int  # drafted levels
    width: int  # most children a node can have; 1 is a chain
    law: Law
    growth: Growth
    temperature: float | None = None  # of the q that children are drawn from; None: nothing is drawn, no q is made
    on_device: bool = True  # `grow` keeps nothing, so that a step may be one CUDA graph

    @property
    def asked(self) -> int:
        """Most nodes the drafter may be asked about in one step."""
        return self.size

    def grow(self, step: Step, ask: Ask) -> Tree:
        raise NotImplementedError

    def smaller(self) -> Sequence[TreePolicy]:
        """Policies whose questions to the drafter, taken together, answer for all smaller trees of this kind."""
        return [self]

    def prepare(self, seconds: Callable[[int], float]) -> None:
        """Called once before decoding; `seconds(n)` measures a target pass over n nodes (for trees shaped by cost)."""

    def observe(self, verdict: Verdict, seconds: float) -> None:
        """Called after every step (for adaptive trees)."""


class Drafter:
    """A next-token distribution. Overrides `propose` only if it owns whole trees, and then states their `law` and `growth`."""

    taps: tuple[
        Tap, ...
    ] = ()  # target features it reads: k = residual stream after k blocks, "norm" = after the final norm
    law: Law | None = None
    growth: Growth | None = None
    # Says how its accepted lengths came about if no draft law made them: all results are marked SIMULATED. Such a drafter is
    # told each answer of plain decoding, at temperature 0, before it drafts for it.
    simulated: str | None = None

    def foretell(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Plain decoding answers `prompt` with `answer`. Called only if `simulated` is set."""

    def reserve(self, batch: int, capacity: int, slots: int) -> None:
        """Called before decoding: at most `capacity` cached tokens in each of `batch` rows, `slots` nodes asked a step."""

    def extend(self, rows: Sequence[int], tokens: Tensor, length: Tensor, features: Tensor | None) -> None:
        """The first `length` [R] of `tokens` [R, T] now stand in the target's cache, from position 0, at `rows`."""

    def expand(self, frontier: Frontier) -> Tensor:
        """-> raw logits [B, W, V]; a row that is all -inf proposes nothing."""
        raise NotImplementedError

    def propose(self, step: Step, policy: TreePolicy, ask: Ask) -> Tree:
        return policy.grow(step, ask)

    def commit(self, step: Step, tree: Tree, verdict: Verdict, features: Tensor | None) -> None:
        """The first `verdict.length` nodes of `verdict.path` were cached; `step` is still the step's start."""

    def release(self, rows: Sequence[int]) -> None:
        """These rows are free."""

    def kept(self) -> Kept | None:
        """For a loop whose steps are one CUDA graph; None: a step of this drafter needs the host."""
        return None


class Verifier:
    """An acceptance rule. It is lossless for the trees whose law and growth it declares; `lossy` says why it is not."""

    laws: frozenset[Law] = frozenset(LAWS)
    growths: frozenset[Growth] = frozenset(GROWTHS)
    chain_only: bool = False
    greedy_only: bool = False  # right at temperature 0 only
    lossy: str | None = None
    # How the white box may replay it from p, q and the tree; None: not at all. "by_law": children are tried in order, by
    # the rule of the tree's law. "given_tree": whatever the tree, the token after each accepted node follows p.
    replay: Literal["by_law", "given_tree"] | None = None
    on_device: bool = True  # `verify` keeps nothing, so that a step may be one CUDA graph
    tv_bound: float | None = None  # of a lossy rule: the law of one token, given those before it, shifts by no more

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        raise NotImplementedError


class Target:
    """The big model. It keeps the K and V of each row in slots; the loop alone keeps the lengths."""

    vocab_size: int
    context: int  # most positions the model can take
    eos: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype

    def reserve(self, batch: int, capacity: int, tree_size: int) -> None:
        raise NotImplementedError

    def release(self) -> None:
        """Give the cache back, between the jobs of a sweep; the next `reserve` makes a new one."""

    def kept(self) -> Kept | None:
        """As a drafter's."""
        return None

    def fingerprint(self) -> str:
        """Tells its weights, and the device and dtype they are on, from those of others."""
        return ""

    def extend(
        self, rows: Sequence[int], tokens: Tensor, length: Tensor, taps: Sequence[Tap]
    ) -> tuple[Tensor, Tensor | None]:
        """Prefill rows from position 0 -> logits [R, V] after each row's last token, features [R, T, F]."""
        raise NotImplementedError

    def forward(self, step: Step, tree: Tree, taps: Sequence[Tap]) -> TargetOutput:
        raise NotImplementedError

    def plain(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits [R, K, V] after the tokens at `places` [K] of `tokens` [R, T], by an independent path, for the checks."""
        raise NotImplementedError

    def reference(self, tokens: list[int], positions: list[int], one_by_one: bool = False) -> Tensor:
        """Logits after the tokens at `positions` by an independent path, for the checks -> [len(positions), V]"""
        raise NotImplementedError

    def seconds(self, nodes: int) -> float:
        """Measured time of a pass over `nodes` nodes; what is in the cache is lost."""
        raise NotImplementedError

    def generate(self, prompt: list[int], budget: int, sampler: Any, stop: Sequence[str], **extra: Any) -> list[int]:
        """The outside baseline of `baseline=hf` -> the new tokens."""
        raise NotImplementedError

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        raise NotImplementedError

    def text(self, ids: list[int]) -> str:
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Token ids of a bare text, with the special tokens that the tokenizer adds by itself."""
        raise NotImplementedError

    def commit(self, step: Step, verdict: Verdict) -> None:
        """Keep the K and V of the accepted nodes, in the order of the path; forget the others."""
        raise NotImplementedError
