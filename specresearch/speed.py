"""The theory of speed, to be laid beside what was measured. E = tokens per step, bonus included; times in plain steps.

All functions are pure. S_j = share of steps in which at least j drafted tokens were accepted (`acceptance_rate_by_depth`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specresearch.metrics import Block, Line, ratio, timed, tree_depth
from specresearch.trees.optimal import Table, interpolate


def identity(rates: Sequence[float]) -> float:
    """E = 1 + sum of S_j: true of any acceptance, however its steps depend on each other."""
    return 1 + sum(rates)


def iid_length(rate: float, depth: int) -> float:
    """E for a chain of `depth` drafts if each were accepted with probability `rate` on its own (Leviathan et al. 2023)."""
    return depth + 1.0 if rate == 1 else (1 - rate ** (depth + 1)) / (1 - rate)


def theory(lines: Sequence[Line]) -> dict[str, float | None]:
    """E as counted, E by the iid formula with two estimates of its rate, and how far each is off.

    `iid_first`: the rate of first drafts; `iid_pooled`: of all drafts that stood in line, i.e. whose predecessors were
    accepted. Steps that differ in difficulty make the first too low and the second too high; rates that fall with depth
    make the first too high. In a tree a draft counts as accepted when one of the siblings is.
    """
    depths: Counter[int] = Counter()
    tried: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    for step in (step for line in lines for step in line["steps"]):
        depth = tree_depth(step)
        depths[depth] += 1
        for j in range(1, min(depth, step["emitted"]) + 1):
            tried[j] += 1
            taken[j] += step["emitted"] > j
    steps = sum(depths.values())
    found = identity([taken[j] / steps for j in sorted(taken)]) if steps else None
    first, pooled = ratio(taken[1], tried[1]), ratio(taken.total(), tried.total())
    out: dict[str, float | None] = {"identity": found}
    for name, rate in (("iid_first", first), ("iid_pooled", pooled)):
        each = None if rate is None else sum(n * iid_length(rate, depth) for depth, n in depths.items()) / steps
        out |= {name: each, f"{name}_gap": each - found if each is not None and found is not None else None}
    return out


def speedup(length: float, *, levels: float, draft: float, tree_pass: float, overhead: float = 0.0) -> float:
    """S = E / (c k + v + o): `levels` k drafted at `draft` c each, one pass over the tree at v, the rest of a step o.

    All in units of a pass over one token. Prompts are left out.
    """
    return length / (levels * draft + tree_pass + overhead)


def best_depth(
    rates: Sequence[float], *, draft: float, tree_pass: Callable[[int], float], overhead: float = 0.0
) -> tuple[int, float]:
    """The chain's depth k of most speed for S_1, S_2, ...; `tree_pass(m)` = the cost of a pass over m nodes -> k, S(k).

    Depth 0 is plain decoding, with a speedup of 1.
    """
    found = [(1.0, 0)]
    for k in range(1, len(rates) + 1):
        cost = {"draft": draft, "tree_pass": tree_pass(k + 1), "overhead": overhead}
        found.append((speedup(identity(rates[:k]), levels=k, **cost), k))
    most, k = max(found, key=lambda pair: (pair[0], -pair[1]))
    return k, most


def positional_length(parents: Sequence[int], table: Table) -> float:
    """E of a fixed tree by Sequoia's positional assumption: each node is reached with the product of the acceptances on
    its path; `table[depth - 1][rank]` = P(the child of this rank is accepted | its parent was)."""
    reach, depth, children = [1.0], [0], Counter[int]()
    for parent in parents[1:]:
        row = table[depth[parent]] if depth[parent] < len(table) else ()
        rank = children[parent]
        reach.append(reach[parent] * (row[rank] if rank < len(row) else 0.0))
        depth.append(depth[parent] + 1)
        children[parent] += 1
    return sum(reach)


# -- the speedup of a run from its costs -------------------------------------------------------------------------------------


def predicted_speedup(done: Sequence[tuple[Block, Sequence[Line]]], costs: Mapping[str, Any]) -> float | None:
    """The speedup that follows from the counted steps, the drafting as timed, and target passes at their measured cost.

    `done` = blocks with their answers, `costs["target"]` = seconds of a pass by its number of nodes, measured apart from
    the run. Prompts and what is neither draft nor target are counted as the run timed them, in both modes, so that a gap
    to the measured speedup shows passes that took another time than they should: longer contexts, other load. A batch's
    pass counts as one over the nodes of all its rows.
    """
    pass_seconds = {int(nodes): seconds for nodes, seconds in costs["target"].items()}
    done = [(block, lines) for block, lines in done if timed(block)]
    own = _rate([block["speculative"] for block, _ in done], _tree_passes(done, pass_seconds))
    plain = _rate([block["baseline"] for block, _ in done], _plain_passes(done, pass_seconds))
    return own / plain if own and plain else None


def _rate(modes: Sequence[Block], passes: float) -> float | None:
    rest = sum(mode["seconds"] - mode["time"]["target"] for mode in modes)
    return ratio(sum(mode["tokens"] for mode in modes), rest + passes)


def _tree_passes(done: Sequence[tuple[Block, Sequence[Line]]], costs: Mapping[int, float]) -> float:
    total = 0.0
    for block, lines in done:
        sizes = [len(step["tokens"]) for line in lines for step in line["steps"]]
        rows = len(sizes) / max(block["speculative"]["target_passes"], 1)  # a pass serves so many, on average
        total += sum(interpolate(costs, rows * size) / rows for size in sizes)
    return total


def _plain_passes(done: Sequence[tuple[Block, Sequence[Line]]], costs: Mapping[int, float]) -> float:
    total = 0.0
    for block, lines in done:
        passes = block["baseline"]["target_passes"]
        if passes:  # each answer's first token comes from its prompt
            total += passes * interpolate(costs, (block["baseline"]["tokens"] - len(lines)) / passes)
    return total
