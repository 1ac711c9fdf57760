"""How a step's time grows with the tree, the context and the batch, and memory with the context and the batch.

    python experiments/growth.py [out=FOLDER] [curves=tree,context,batch] [rounds=3] [memory=true] [overrides ...]

A FOLDER that was begun is gone on with, or only read if it is complete: lines.jsonl has a line for each (point, mode, round).

**Time.** Steps of our own loop, batch by batch as a run makes them, with the shipped EAGLE head (trees of EAGLE-2) and plainly:
the target's pass, the drafter, and the rest (verification, commit, reading the tokens). All points take turns, round after
round; a round is some warm steps and the median of eight others, a point the median of its rounds. Trees are grown at a
context of 256 and batch 1, contexts and batches with the default tree. The prompt's pass is left out: the cache is filled
with zeros in its place, which takes the same time to read, so that 8192 tokens of context cost no 8192 tokens of prefill.

**The floor** of a pass is the bytes that it must read, weights as they are held and K and V of every row's context, over the
read bandwidth, measured in each round by a sum over 256 MB (`peer/machine.py`).

**Memory** (`memory=true`) is the peak of a fresh process for each point, which answers a real prompt of that length with EAGLE,
prefill in chunks included; what loading takes is forgotten before, where the system can. Its floor is what must be held:
weights and cache.

**The law** under each table is a + b x by least squares, with the largest distance from it of any point; b of the memory is
to be read beside the cache's own bytes a token.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from peer.curves import CONTEXT, XS, Curves, Point, tables
from peer.machine import bandwidth, cache_bytes, weight_bytes
from peer.plain_models import Models

from specresearch import cli, console
from specresearch.decode import Decoder, Job, Parts
from specresearch.provenance import peak_memory, provenance, reset_peak_memory
from specresearch.results import append_lines, read_lines
from specresearch.types import UserError

WARM, STEPS = 2, 8


def points(curves: Sequence[str]) -> list[Point]:
    """Plainly and with EAGLE; a tree of one node is plain decoding's."""
    modes = {True: ("plain",), False: ("eagle",), None: ("plain", "eagle")}
    return [
        Point(curve, x, mode)
        for curve in curves
        for x in XS[curve]
        for mode in modes[x == 1 if curve == "tree" else None]
    ]


class Unread:
    """The target, but prompts are not computed: their K and V stay zero. It knows no end token, so that all steps are made."""

    eos = ()

    def __init__(self, target: Any):
        self.whole = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def extend(self, rows: Sequence[int], tokens: torch.Tensor, length: torch.Tensor, taps: Sequence[Any]) -> Any:
        shape, like = tokens.shape, {"dtype": self.whole.dtype, "device": tokens.device}
        width = self.whole.model.config.hidden_size * len(taps)
        return torch.zeros(len(rows), self.whole.vocab_size, **like), torch.zeros(
            *shape, width, **like
        ) if taps else None


def decoder_of(parts: Parts, point: Point) -> tuple[Decoder, list[Job]]:
    """For `WARM + STEPS` steps behind as many tokens as leave the room that these may need."""
    room = (WARM + STEPS + 1) * (parts.policy.depth + 1)
    slots, length = max(parts.policy.asked, parts.policy.size), point.context - room
    parts.target.release()  # zeros again, and no more slots than this point needs
    parts.target.reserve(point.batch, point.context, slots)
    parts.drafter.reserve(point.batch, point.context, slots)
    options = {"batch": point.batch, "capacity": point.context, "seed": 0, "decode": lambda ids: "", "stop": []}
    prompt = [1 + place % 100 for place in range(length)]
    return Decoder(parts, **options), [Job(i, "prompt", 0, prompt, room) for i in range(point.batch)]


def step_times(parts: Parts, point: Point) -> dict[str, float]:
    """Median seconds of a step by part."""
    decoder, jobs = decoder_of(replace(parts, target=Unread(parts.target)), point)
    marks = list(marked(decoder, jobs))[: WARM + STEPS + 1]
    spans = [{part: b[part] - a[part] for part in b} for a, b in zip(marks[WARM:], marks[WARM + 1 :])]
    return {part: statistics.median(span[part] for span in spans) for part in spans[0]}


def marked(decoder: Decoder, jobs: Sequence[Job]) -> Iterator[dict[str, float]]:
    """The clock after the prompts and after each step; rows that end earlier than others are left out of it."""
    passes, run = -1, decoder.run(iter(jobs))
    for number, emission in enumerate(run):
        if emission.done or decoder.passes > WARM + STEPS:
            return
        if decoder.passes != passes and (decoder.passes or number == len(jobs) - 1):
            passes = decoder.passes
            yield dict(decoder.clock.seconds)


def measure(models: Models, wanted: Sequence[Point], rounds: int, path: Path) -> None:
    done = {(x["curve"], x.get("x"), x.get("mode"), x["round"]) for x in read_lines(path)}
    with console.progress() as bar:
        task = bar.add_task("measuring", total=rounds * len(wanted), note="")
        for number in range(rounds):
            if ("bandwidth", None, None, number) not in done:
                append_lines(path, [{"curve": "bandwidth", "round": number, "rate": bandwidth(models.target.device)}])
            for point in [*wanted[number % 2 :: 2], *wanted[1 - number % 2 :: 2]]:
                place = {"curve": point.curve, "x": point.x, "mode": point.mode, "round": number}
                if tuple(place.values()) not in done:
                    parts = models.parts(*point.overrides(), name=point.mode)
                    append_lines(path, [place | {"time": step_times(parts, point)}])
                    gc.collect()
                bar.update(task, advance=1, note=f"{point.curve} {point.x} {point.mode}")


# -- memory ----------------------------------------------------------------------------------------------------------------


def memory(curves: Sequence[str], arguments: Sequence[str], path: Path) -> None:
    """A process for each point -> memory.jsonl"""
    done = {(x["curve"], x["x"]) for x in read_lines(path)}
    for curve in ("context", "batch"):
        for x in XS[curve] if curve in curves else ():
            if (curve, x) not in done:
                command = [sys.executable, __file__, *arguments, f"one={curve}:{x}"]
                ended = subprocess.run(command, capture_output=True, text=True)
                if ended.returncode != cli.OK:
                    raise UserError(f"memory at {curve} {x} was not measured: {ended.stderr.strip()[-200:]}")
                append_lines(path, [{"curve": curve, "x": x, "bytes": int(ended.stdout.split()[-1])}])


def one(models: Models, said: str) -> None:
    """The peak of this process while it reads a real prompt and makes some steps."""
    curve, _, x = said.partition(":")
    parts = models.parts("drafter=eagle", name="eagle")
    small = Point("context", CONTEXT // 2, "eagle")
    for point in (small, Point(curve, int(x), "eagle")):
        decoder, jobs = decoder_of(parts, point)
        gc.collect()
        reset_peak_memory()
        list(marked(decoder, jobs))
    print(peak_memory(models.target.device))


def about(models: Models) -> dict[str, Any]:
    source = provenance(models.target)
    device, versions = source["device"], source["versions"]
    where = f"{source['time'][:10]}, {device['name']}, {device['threads']} threads, {device['dtype']}, "
    where += f"torch {versions['torch']}"
    held = {"weights": weight_bytes(models.target.model), "cache": cache_bytes(models.target)}
    return held | {"where": where, "overrides": models.given}


def main(arguments: Sequence[str]) -> None:
    options = {"out": "", "curves": ",".join(XS), "rounds": "3", "memory": "", "one": ""}
    pairs = [a.partition("=")[::2] for a in arguments]
    said = options | {key: value for key, value in pairs if key in options}
    models = Models([a for a, (key, _) in zip(arguments, pairs) if key not in options])
    folder = Path(said["out"] or f"runs/growth/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    try:
        curves = said["curves"].split(",")
        if unknown := [curve for curve in curves if curve not in XS]:
            raise UserError(f"curves={','.join(unknown)} is unknown: use some of {', '.join(XS)}")
        if not said["rounds"].isdecimal() or int(said["rounds"]) < 1:
            raise UserError(f"rounds={said['rounds']}: use a whole number of at least 1")
        if said["one"]:
            return one(models, said["one"])
        folder.mkdir(parents=True, exist_ok=True)
        if said["memory"] == "true":
            memory(curves, [a for a in arguments if not a.startswith("memory=")], folder / "memory.jsonl")
        measure(models, points(curves), int(said["rounds"]), folder / "lines.jsonl")
        (folder / "about.json").write_text(json.dumps(about(models)), encoding="utf-8")
    except KeyboardInterrupt:
        print(f"interrupted: go on with  out={folder}  and the same arguments", file=sys.stderr)
        sys.exit(cli.INTERRUPTED)
    except Exception as error:
        sys.exit(cli.report(error))
    files = (read_lines(folder / f"{name}.jsonl") for name in ("lines", "memory"))
    print(f"\n{tables(Curves(*files, about(models)))}\n\nwritten to {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
