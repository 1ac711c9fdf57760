"""Does a tree pass compute the logits that one token after the other would? Equality of tokens hardly tells: positions that
are off by one flipped no token in 48, at 10,000 times the rounding noise of float32. So logits are compared.

The yardstick is the model's own: how far its whole-sequence pass lies from its one-token passes over the same tokens. Faults
are hunted in float32 (or float64); in bfloat16 the noise itself is of a fault's size, and the report shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specresearch.rng import CounterRng
from specresearch.types import Step, Target, Tree, UserError, Verdict

ALLOWED = 4.0  # times the noise
SHAPES = ((1, 0), (2, 0), (3, 1), (4, 3), (8, 3))  # (drafted levels, decoys beside each): 2 to 33 nodes
PLACES = 48  # tokens at the end of each sequence that are compared


@dataclass(frozen=True)
class Forward:
    verdict: Literal["exact", "fault"]
    error: float  # largest difference of any logit between a tree pass and the one-token pass over the same tokens
    noise: float  # the same between the model's own whole-sequence and one-token passes
    ratio: float
    worst: dict[str, Any]  # where the largest error was: sequence, position, tree size, depth of the node
    by_size: dict[int, float]  # largest error by number of nodes
    positions: int
    sequences: int
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def check_forward(target: Target, sequences: Sequence[Sequence[int]], places: int = PLACES) -> Forward:
    """Decode known `sequences` (of two tokens or more, best of different lengths) once more: all rows at once, in trees of
    several sizes that hold the known continuation and decoys beside it, accepting a different number of nodes in each
    row and step. The target's cache is taken. Raises UserError where there is nothing to compare."""
    known = [list(ids)[: target.context - max(levels for levels, _ in SHAPES)] for ids in sequences]
    if not known or min(map(len, known)) < 4:
        raise UserError("the forward pass is checked on sequences of at least 4 tokens: give longer ones")
    count = min(places, min(map(len, known)) - 3)  # compared at the end of each sequence
    one = [_reference(target, ids, count, one_by_one=True) for ids in known]
    noise = max(float((a - _reference(target, ids, count, one_by_one=False)).abs().max()) for a, ids in zip(one, known))
    scale = max(float(a.abs().max()) for a in one)
    noise = max(noise, scale * torch.finfo(target.dtype).eps)  # one rounding of the largest logit is always granted
    found = list(_errors(target, known, one, count))
    worst = max(found, key=lambda entry: entry["error"])
    sizes = sorted({entry["size"] for entry in found})
    # NaN is a fault: it is not below the bound.
    return Forward(
        verdict="exact" if worst["error"] <= ALLOWED * noise else "fault",
        error=worst["error"],
        noise=noise,
        ratio=worst["error"] / noise,
        worst={key: value for key, value in worst.items() if key != "error"},
        by_size={size: max(e["error"] for e in found if e["size"] == size) for size in sizes},
        positions=len({(e["sequence"], e["position"]) for e in found}),
        sequences=len(known),
        dtype=str(target.dtype).removeprefix("torch."),
    )


def _reference(target: Target, ids: list[int], count: int, one_by_one: bool) -> Tensor:
    """Logits [count, V] after the last `count` tokens."""
    return target.reference(ids, list(range(len(ids) - count, len(ids))), one_by_one).double()


def _errors(target: Target, known: list[list[int]], one: list[Tensor], count: int) -> Iterator[dict[str, Any]]:
    """Tree passes along the ends of all sequences; for each node of the known continuation, how far its logits are off."""
    rows = len(known)
    start = [len(ids) - count for ids in known]  # the first place that is compared: the root of the first tree
    longest = max(map(len, known))
    most = max(levels * (1 + decoys) + 1 for levels, decoys in SHAPES)
    target.reserve(rows, longest + 1, most)
    tokens = torch.zeros(rows, longest + 1, dtype=torch.long, device=target.device)
    for row, ids in enumerate(known):
        tokens[row, : len(ids)] = torch.tensor(ids)
    length = torch.tensor(start, device=target.device)
    target.extend(range(rows), tokens[:, : max(start)], length, ())
    at, turn = list(start), 0  # the root's place in each row
    while any(place < len(ids) for place, ids in zip(at, known)):
        levels, decoys = SHAPES[turn % len(SHAPES)]
        step = _step(tokens, torch.tensor(at, device=target.device), known)
        tree, trunk = _tree(step, levels, decoys, target.vocab_size, turn)
        logits = target.forward(step, tree, ()).logits.double()
        accepted = []
        for row, ids in enumerate(known):
            left = min(levels + 1, len(ids) - at[row])
            for depth in range(left):
                place = at[row] + depth
                error = float((logits[row, trunk[depth]] - one[row][place - start[row]]).abs().max())
                error = error if error == error else torch.inf
                yield {"error": error, "sequence": row, "position": place, "size": tree.tokens.shape[1], "depth": depth}
            accepted.append(max(min(1 + (turn + row) % (levels + 1), left), 0))
        target.commit(step, _accept(step, trunk, accepted))
        at = [place + emitted for place, emitted in zip(at, accepted)]
        turn += 1


def _step(tokens: Tensor, length: Tensor, known: list[list[int]]) -> Step:
    """The state in which the root stands at place `length` of each row. Rows that have ended stand still."""
    ends = torch.tensor([len(ids) for ids in known], device=length.device)
    root = tokens.gather(1, length[:, None])[:, 0]
    rng = CounterRng(length, length)
    return Step(root, length, length, length < ends, torch.ones_like(length), tokens, rng, int(length.max()))


def _tree(step: Step, levels: int, decoys: int, vocab: int, turn: int) -> tuple[Tree, list[int]]:
    """The known continuation with `decoys` beside each of its nodes -> the tree, the nodes of the continuation.

    A level is decoys, then the true node, in an order that changes with the turn; decoys hang on the true parent. So
    accepted nodes are never side by side, and a commit must move them."""
    batch, device = step.root.shape[0], step.root.device
    trunk, parents, depths = [0], [-1], [0]
    for level in range(1, levels + 1):
        first = len(parents)
        parents += [trunk[-1]] * (1 + decoys)
        depths += [level] * (1 + decoys)
        trunk.append(first + (turn + level) % (1 + decoys))
    size = len(parents)
    depth, parent = (torch.tensor(x, device=device).expand(batch, -1) for x in (depths, parents))
    place = (step.length[:, None] + depth).clamp(max=step.tokens.shape[1] - 1)
    node = torch.arange(size, device=device)
    true = step.tokens.gather(1, place)
    shift = torch.where(torch.isin(node, torch.tensor(trunk, device=device)), 0, 1 + node)
    tokens, valid = (true + shift) % vocab, torch.ones(batch, size, dtype=torch.bool, device=device)
    return Tree(tokens, parent, depth, valid, torch.zeros(batch, size, device=device), "point", "static", levels), trunk


def _accept(step: Step, trunk: list[int], accepted: list[int]) -> Verdict:
    path = torch.full((len(accepted), len(trunk)), -1, dtype=torch.long, device=step.root.device)
    for row, count in enumerate(accepted):
        path[row, :count] = torch.tensor(trunk[:count], device=path.device)
    return Verdict(path, torch.tensor(accepted, device=path.device), step.root)
