"""How soon the black box sees each fault, and how often it errs: on laws of the real target, with faults simulated.

    python experiments/power.py [pool=FILE] [overrides ...]

Answers of conf/experiment/power.yaml are sampled once; p and q (the target on its last 10 tokens) at every place of theirs
are the pool, [384, V] each, kept in `pool` if that is given. A path visits places at random and draws each token from the
law that a faulty engine would have there. `experiments/power.md` holds a recorded result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import specresearch
from specresearch.lossless import eprocess
from specresearch.lossless.blackbox import plan
from specresearch.lossless.reference import Reference
from specresearch.lossless.scores import battery
from specresearch.prompts import builtin

PLACES = 384
DRAWS = 256  # tokens drawn from each law at each place; paths choose among them
ALPHA = 1e-3
Law = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # p, q -> the law claimed, the law that tokens have


def record(overrides: list[str]) -> dict[str, Tensor]:
    engine = specresearch.engine("experiment=power", *overrides)
    reference = Reference(engine.parts.target, engine.parts.sampler, context=10, stride=1)
    rows: list[tuple[Tensor, Tensor]] = []
    for question in builtin():
        if sum(len(p) for p, _ in rows) >= PLACES:
            break
        prompt = engine.parts.target.chat([{"role": "user", "content": question.turns[0]}])
        rows.append(reference.rows(prompt, engine.generate(question.turns[0]).ids))
    p, q = (torch.cat(parts)[:PLACES].contiguous() for parts in zip(*rows))
    return {"p": p, "q": q}


def pool(path: str | None, overrides: list[str]) -> dict[str, Tensor]:
    if path and Path(path).is_file():
        return load_file(path)
    made = record(overrides)
    if path:
        save_file(made, path)
    return made


# -- laws, for p and q [n, V] ------------------------------------------------------------------------------------------


def heat(law: Tensor, temperature: float) -> Tensor:
    return (law.log() / temperature).softmax(-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp(min=0)
    return rest / rest.sum(-1, keepdim=True)


def chain(draft: Tensor, accept: Tensor, rest: Tensor) -> Tensor:
    """Law of a token: drafted by `draft`, accepted with probability `accept`, else drawn from `rest`."""
    taken = draft * accept.clamp(max=1).nan_to_num(0.0)
    return taken + (1 - taken.sum(-1, keepdim=True)).clamp(min=0) * rest


def greedy(q: Tensor) -> Tensor:
    return torch.zeros_like(q).scatter_(1, q.argmax(1, keepdim=True), 1.0)


LAWS: dict[str, Law] = {
    "none (null)": lambda p, q: (p, p),
    "accept u < sqrt(p/q)": lambda p, q: (p, chain(q, (p / q).sqrt(), residual(p, q))),
    "resample from p": lambda p, q: (p, chain(q, p / q, p)),
    "T = 0.7 on q only, p at 1": lambda p, q: (heat(p, 0.7), p),
    "draft at T = 0.7, q at 1 claimed": lambda p, q: (p, chain(heat(q, 0.7), p / q, residual(p, q))),
    "argmax draft, softmax q": lambda p, q: (p, chain(greedy(q), p / q, residual(p, q))),
}


# -- paths -------------------------------------------------------------------------------------------------------------


def tables(made: dict[str, Tensor], law: Law) -> tuple[list[Tensor], float]:
    """Scores of DRAWS tokens at each place (excess [n, K, S], variance, range [n, S], impossible [n, K]), mean TV."""
    parts, distance = [], []
    for p, q in zip(made["p"].split(16), made["q"].split(16)):
        claimed, true = law(p, q)
        tokens = torch.multinomial(true, DRAWS, replacement=True)
        parts.append(battery(claimed, q, tokens))
        distance.append((claimed - true).abs().sum(1) / 2)
    return [torch.cat(column) for column in list(zip(*parts))[:4]], float(torch.cat(distance).mean())


def paths(table: list[Tensor], count: int, length: int, block: int = 50) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of simulated paths -> log wealth along them [block, length], z of each score at the end [block, S]"""
    excess, variance, ranges, impossible = table
    for _ in range(0, count, block):
        place, draw = (torch.randint(n, (block * length,)) for n in impossible.shape)
        logs = eprocess.growth(excess[place, draw], ranges[place], impossible[place, draw])
        wealth = eprocess.wealth(logs.view(block, length, -1).cumsum(1))
        drift, spread = (x.view(block, length, -1).sum(1) for x in (excess[place, draw], variance[place]))
        yield wealth, drift / spread.sqrt()


def row(name: str, made: dict[str, Tensor], null: int = 2000, faulty: int = 400) -> str:
    table, tv = tables(made, LAWS[name])
    length = 2 * plan(tv, ALPHA) if name != "none (null)" else 1024
    wealth, z = (torch.cat(x) for x in zip(*paths(table, null if name == "none (null)" else faulty, min(length, 4000))))
    over = wealth.cummax(1).values >= math.log(1 / ALPHA)
    alarms = int(over[:, -1].sum())
    stop = torch.where(over.any(1), over.long().argmax(1) + 1, 1 << 30).double()
    bar = 3.72  # |z| of five scores at 1e-3, two-sided, Bonferroni
    fixed = int((z.abs().amax(1) > bar).sum())
    median, late = (int(stop.quantile(x)) if alarms > x * len(stop) else None for x in (0.5, 0.9))
    shown = " | ".join(str(x) if x else "-" for x in (median, late))
    return f"| {name} | {tv:.3f} | {shown} | {alarms} of {len(stop)} | {fixed} of {len(stop)} @{wealth.shape[1]} |"


def main(arguments: list[str]) -> None:
    torch.manual_seed(0)
    given = dict(a.split("=", 1) for a in arguments if a.startswith("pool="))
    made = pool(given.get("pool"), [a for a in arguments if not a.startswith("pool=")])
    p, q = made["p"], made["q"]
    mass = (p * (q > p)).sum(1)
    print(
        f"pool: {len(p)} places, V = {p.shape[1]}; sum min(p, q) = {float(torch.minimum(p, q).sum(1).mean()):.3f}, ",
        end="",
    )
    print(f"mass of {{q > p}}: {float(mass.mean()):.3f}, its variance {float((mass * (1 - mass)).mean()):.3f}\n")
    print("| fault | TV | tokens to alarm: median | p90 | alarms | fixed-n z |\n|---|---|---|---|---|---|")
    for name in LAWS:
        print(row(name, made), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
