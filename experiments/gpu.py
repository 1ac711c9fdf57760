"""What the engine adds to the target's passes, for a large model's shape: random weights, dictated accepted lengths.

    python experiments/gpu.py [shape=llama-3.1-8b] [context=512] [tokens=128] [length=3.2] [rounds=3] [out=runs/gpu.json]

Made for one GPU (Llama 3.1 8B in bfloat16: 16 GB), which need not be able to reach anything; a CPU takes shape=smollm2-135m
context=64 tokens=32. Neither Hydra nor W&B is imported. The file written holds every figure.

**Rows.** Plain decoding, and trees of several sizes whose drafter is an oracle: it puts `length` - 1 tokens of the plain
answer on one path and costs nothing, so a row's speed is what a drafter of that length would allow at most. Rows take turns,
round after round, one prompt of `context` random bytes each time; a row's figures are medians over the rounds. The prompt's
pass is left out. On a GPU a step is one CUDA graph; "launched" rows do the same with the pass alone recorded, and all else of a
step started kernel by kernel.

**The floor** of a pass is the weights and K and V of the context, over the read bandwidth: a large tensor is summed, before
each round. **Overhead** is the time of a step that is neither the target's pass nor the drafter's.

**Passes** by their nodes behind the same context, as the engine runs them (on a GPU one CUDA graph) and launched kernel by
kernel.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from peer.machine import bandwidth, cache_bytes, weight_bytes

from specresearch.baseline import plain_of
from specresearch.decode import Decoder, Job, Parts, Turn
from specresearch.drafters.simulated import Simulated
from specresearch.models import random_weights
from specresearch.models.graphs import Graphs
from specresearch.models.hf import HFModel
from specresearch.sampling import Sampler
from specresearch.trees.dynamic import DynamicTree
from specresearch.types import UserError
from specresearch.verifiers.greedy import Greedy

OPTIONS = {
    **{"shape": "llama-3.1-8b", "context": "512", "tokens": "128", "length": "3.2", "rounds": "3"},
    "out": "runs/gpu.json",
}
TREES = {
    "chain of 4": (4, 1, 5),
    "16 nodes": (5, 4, 16),
    "32 nodes": (6, 8, 32),
    "64 nodes": (6, 8, 64),
}  # depth, topk, size
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
BESIDE = ("verify", "commit", "other")
LAUNCHED = ", launched"


def rows_of(target: HFModel, length: float) -> dict[str, Parts]:
    drafter = Simulated(target, length=length, method="match_expected")
    trees = {name: DynamicTree(depth=d, topk=k, size=n, temperature=0) for name, (d, k, n) in TREES.items()}
    parts = {name: Parts(target, drafter, tree, Greedy(), Sampler()) for name, tree in trees.items()}
    return {"plain": plain_of(next(iter(parts.values()))), **parts}


def ways_of(target: HFModel) -> Sequence[str]:
    return ("", LAUNCHED) if target.device.type == "cuda" else ("",)


def loops_of(rows: Mapping[str, Parts], capacity: int) -> dict[str, Decoder]:
    """A loop for each row, and on a GPU another one that records no steps."""
    loops = {}
    for name, parts in rows.items():
        for way in ways_of(parts.target):
            loop = Decoder(parts, batch=1, capacity=capacity, seed=0, decode=lambda ids: "", stop=[])
            loop.graphs.how = loop.graphs.how if way == "" else None
            loops[name + way] = loop
    return loops


def answer(decoder: Decoder, job: Job) -> tuple[Turn, dict[str, float]]:
    """-> the answer, and seconds of its steps by part"""
    turn, before = None, {}
    for emission in decoder.run(iter([job])):
        turn, before = emission.turn, before or dict(decoder.clock.seconds)
    assert turn is not None
    return turn, {part: seconds - before[part] for part, seconds in decoder.clock.seconds.items()}


def measure(target: HFModel, said: dict[str, str], note: Callable[[str], None]) -> dict[str, Any]:
    context, tokens, rounds = (int(said[key]) for key in ("context", "tokens", "rounds"))
    rows, capacity = rows_of(target, float(said["length"])), context + tokens
    reserve = max(max(p.policy.size, p.policy.asked) for p in rows.values())
    target.reserve(1, capacity, reserve)
    prompt = torch.randint(0, 256, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    job = Job(0, "random", 0, prompt, tokens)
    drafter = next(p.drafter for name, p in rows.items() if name != "plain")
    drafter.reserve(1, capacity, reserve)
    loops = loops_of(rows, capacity)
    drafter.foretell(prompt, answer(loops["plain"], job)[0].output_ids)
    for name, loop in loops.items():
        note(f"warm-up: {name}")
        answer(loop, job)  # all of it, so that steps of all lengths are recorded beforehand
    rates: list[float] = []
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in loops}
    for number in range(rounds):
        size = 4 << 30 if target.device.type == "cuda" else 256 << 20
        rates.append(bandwidth(target.device, size))
        names = list(loops)[number % len(loops) :] + list(loops)[: number % len(loops)]
        for name in names:
            note(f"round {number + 1} of {rounds}: {name}")
            played = loops[name].graphs.played
            turn, seconds = answer(loops[name], job)
            graphs = loops[name].graphs.played - played
            own = {"tokens": len(turn.output_ids) - 1, "steps": len(turn.steps), "graphs": graphs, "seconds": seconds}
            found[name].append(own)
    return {"rates": rates, "rows": found, "passes": passes(target, context, note)}


def passes(target: HFModel, context: int, note: Callable[[str], None]) -> dict[str, dict[int, float]]:
    """Seconds of a pass by its nodes, as the engine runs it, and kernel by kernel where it does not."""
    own, found = target.fast, {}
    ways = {"engine": own} | ({"kernel by kernel": own.forward} if isinstance(own, Graphs) else {})
    for way, forward in ways.items():
        note(f"passes: {way}")
        target.fast = forward
        found[way] = {nodes: target.seconds(nodes, context) for nodes in NODES}
    target.fast = own
    return found


def table(made: dict[str, Any]) -> str:
    """Markdown of what was measured."""
    said, rate = made["said"], statistics.median(made["rates"])
    floor = (made["weights"] + made["cache"] * int(said["context"])) / rate
    rows = [
        "| | accepted length | tokens/s | / plain | time a token / floor | target | draft | overhead | of a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    median = {name: _median(each) for name, each in made["rows"].items()}
    plain = median["plain"]
    for name, own in median.items():
        cells = [f"{own['tokens'] / own['steps']:.2f}", f"{own['rate']:.1f}", f"{own['rate'] / plain['rate']:.2f}"]
        cells += [f"{1 / own['rate'] / floor:.2f}", *(f"{1e3 * own[part]:.2f} ms" for part in ("target", "draft"))]
        cells += [f"{1e3 * own['beside']:.2f} ms", f"{own['beside'] / own['step']:.1%}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows += ["", "| pass over | " + " | ".join(made["passes"]) + " | of the floor |"]
    rows += ["|---:|" + "---:|" * (len(made["passes"]) + 1)]
    for nodes, seconds in made["passes"]["engine"].items():
        times = [f"{1e3 * way[nodes]:.2f} ms" for way in made["passes"].values()]
        rows.append(f"| {nodes} | {' | '.join(times)} | {seconds / floor:.2f} |")
    engine = {name: own for name, own in median.items() if not name.endswith(LAUNCHED)}
    share = max(own["beside"] / own["step"] for own in engine.values())
    graphs, steps = (int(sum(own[key] for own in engine.values())) for key in ("graphs", "steps"))
    rows += [
        "",
        f"- plain decoding within 1.25 of the floor: {1 / plain['rate'] / floor:.2f}",
        f"- overhead of a step under 5%: at most {share:.1%}",
        f"- a whole step in one CUDA graph: {graphs} of {steps} steps of an answer, by any row",
        f"- {made['shape_bytes']}; memory is read at {rate / 1e9:.0f} GB/s, so the floor of a pass is {1e3 * floor:.2f} ms",
        f"- SIMULATED: lengths were dictated ({said['length']}) and the weights are random; {made['where']}",
    ]
    return "\n".join(rows)


def _median(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Of a step, in seconds; all rounds make the same steps."""
    tokens, steps = rounds[0]["tokens"], rounds[0]["steps"]
    parts = {part: statistics.median(r["seconds"][part] / r["steps"] for r in rounds) for part in ("target", "draft")}
    beside = statistics.median(sum(r["seconds"][part] for part in BESIDE) / r["steps"] for r in rounds)
    step = statistics.median(sum(r["seconds"].values()) / r["steps"] for r in rounds)
    graphs = statistics.median(r["graphs"] for r in rounds)
    return {
        "tokens": tokens,
        "steps": steps,
        "graphs": graphs,
        **parts,
        "beside": beside,
        "step": step,
        "rate": tokens / steps / step,
    }


def main(arguments: list[str]) -> None:
    pairs = [argument.partition("=")[::2] for argument in arguments]
    said = OPTIONS | dict(pairs)
    try:
        if unknown := [key for key, _ in pairs if key not in OPTIONS]:
            raise UserError(f"{unknown[0]} is unknown: use some of {', '.join(OPTIONS)}")
        for key in ("context", "tokens", "rounds"):
            least = 2 if key == "tokens" else 1
            if not said[key].isdecimal() or int(said[key]) < least:
                raise UserError(f"{key}={said[key]}: use a whole number of at least {least}, e.g. {key}={OPTIONS[key]}")
        if not re.fullmatch(r"\d+(\.\d+)?", said["length"]):
            raise UserError(
                f"length={said['length']}: use a number of tokens per step, e.g. length={OPTIONS['length']}"
            )
        target = random_weights.load(shape=said["shape"])
        made = measure(target, said, lambda what: print(what, file=sys.stderr))
    except (UserError, ValueError) as error:
        sys.exit(f"error: {error}")
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu"
    where = f"{datetime.now():%Y-%m-%d}, {device}, {target.dtype}, torch {torch.__version__}"
    held = {"weights": weight_bytes(target.model), "cache": cache_bytes(target), "said": said, "where": where}
    held["shape_bytes"] = f"{said['shape']}: a pass reads {held['weights'] / 1e9:.2f} GB of weights"
    made |= held
    out = Path(said["out"])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(made), encoding="utf-8")
    print(f"\n{table(made)}\n\nwritten to {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
