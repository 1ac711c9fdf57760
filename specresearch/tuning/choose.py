"""Which trees are tried, what the cost model says of each, and what real runs of the best say to that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specresearch.run import Run
from specresearch.trees.dynamic import DynamicTree
from specresearch.types import UserError
from specresearch.whatif.answer import Recording, answers
from specresearch.whatif.candidates import SIZES
from specresearch.whatif.price import Prices

OBJECTIVES = ("tokens_per_second", "speedup", "mean_accepted_length")
CLOSE = 0.10  # how far a run may be from its prediction


@dataclass(frozen=True)
class Choice:
    """A tree and what it is worth. Speeds are against plain decoding: the machine's moods are in both."""

    depth: int
    topk: int
    size: int
    length: float  # predicted accepted length
    speedup: float  # predicted
    tokens_per_second: float  # predicted, on a machine as it was while recording
    ran_length: float | None = None
    ran_speedup: float | None = None
    ran_tokens_per_second: float | None = None

    @property
    def tree(self) -> dict[str, int]:
        return {"depth": self.depth, "topk": self.topk, "size": self.size}

    @property
    def name(self) -> str:
        return f"chain-{self.depth}" if self.topk == 1 else f"tree-{self.depth}-{self.topk}-{self.size}"

    @property
    def gap(self) -> float | None:
        """Of the measured speedup from the predicted one, as a share of that."""
        return None if self.ran_speedup is None else self.ran_speedup / self.speedup - 1

    def worth(self, objective: str) -> float:
        """By measurement where there is one."""
        if objective == "mean_accepted_length":
            return self.length if self.ran_length is None else self.ran_length
        return self.speedup if self.ran_speedup is None else self.ran_speedup

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name, "gap": self.gap}


def trees(largest: DynamicTree) -> Iterator[DynamicTree]:
    """Chains of every length, and dynamic trees of every depth, topk and usual size."""
    sizes = sorted({n for n in (*SIZES, largest.size) if n <= largest.size})
    for depth in range(1, largest.depth + 1):
        yield DynamicTree(depth=depth, topk=1, size=depth + 1, temperature=0)
        for topk in range(2, largest.topk + 1):
            for size in sizes:
                if size <= depth + 1:
                    continue
                tree = DynamicTree(depth=depth, topk=topk, size=size, temperature=0)
                if tree.size == size:  # else there are fewer nodes than that
                    yield tree


def predicted(
    own: Recording, prices: Prices, plain_seconds: float, tick: Callable[[], None] = lambda: None
) -> list[Choice]:
    """All trees as the recording and the prices tell of them, in the order in which they are tried."""
    policies = list(trees(own.policy))  # type: ignore[arg-type]
    plain = sum(len(line["output_ids"]) for line in own.lines) / plain_seconds
    found = []
    for tree, answer in zip(policies, answers(own, policies, prices, tick)):
        if answer.mean_accepted_length is None or not answer.tokens_per_second:
            raise UserError("nothing was decoded, so nothing can be told of speed: raise limit or max_new_tokens")
        speed = answer.tokens_per_second
        found.append(Choice(tree.depth, tree.width, tree.size, answer.mean_accepted_length, speed / plain, speed))
    return found


def best(found: Sequence[Choice], objective: str, count: int) -> list[Choice]:
    """The `count` best; of equal ones the smallest."""
    return sorted(found, key=lambda one: (-one.worth(objective), one.size))[:count]


def measured(choice: Choice, run: Run, plain: float) -> Choice:
    """With what its run shows; `plain` = tokens per second of plain decoding in turn with it."""
    summary = run.summary()
    speed = summary["tokens_per_second"]
    ran = {"ran_length": summary["mean_accepted_length"], "ran_tokens_per_second": speed}
    return replace(choice, **ran, ran_speedup=speed / plain if speed else None)
