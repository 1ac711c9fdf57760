"""Prompts answered by rows in turn, in an order that rotates; a line for every answer, so that a run can be gone on with."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peer.engines import start
from peer.libraries import Decode, Setting
from peer.machine import bandwidth
from peer.plain_models import Models

from specresearch import console
from specresearch.models.hf import one_line
from specresearch.results import append_lines, read_lines
from specresearch.types import UserError

WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Prompt:
    id: Any
    kind: str
    ids: list[int]


class Racer:
    """A row, started when its turn comes for the first time. What goes wrong in it is its own affair, and is written down: one
    that cannot start is not asked again, one that fails on a prompt has the others."""

    def __init__(self, name: str, setting: Setting, models: Models):
        self.name, self.setting, self.models = name, setting, models
        self.decode: Decode | None = None
        self.fault = ""

    def answer(self, prompt: Prompt, budget: int) -> dict[str, Any] | None:
        """None where it cannot: `fault` says why."""
        if self.fault and self.decode is None:
            return None
        try:
            if self.decode is None:
                decode = start(self.name, self.models, self.setting)
                decode(prompt.ids, min(WARM_UP, budget))
                self.decode = decode
            began = time.perf_counter()
            answer = self.decode(prompt.ids, budget)
            seconds = time.perf_counter() - began
        except Exception as error:  # other people's programs raise many kinds
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.fault = kind + one_line(error)
            return None
        done = {"tokens": len(answer.ids), "seconds": seconds, "passes": answer.passes, "output_ids": answer.ids}
        return done | ({"time": answer.time} if answer.time else {})


def take_turns(racers: Mapping[str, Racer], prompts: Sequence[Prompt], repeats: int, budget: int, path: Path) -> None:
    """Every prompt by every row, in an order that rotates; what `path` holds already is not asked again."""
    done = {(x["row"], x.get("id"), x.get("repeat")) for x in read_lines(path)}
    turns = [(repeat, prompt) for repeat in range(repeats) for prompt in prompts]
    with console.progress() as bar:
        task = bar.add_task("decoding", total=len(turns) * len(racers), note="")
        for number, (repeat, prompt) in enumerate(turns):
            if ("bandwidth", prompt.id, repeat) not in done:
                rate = bandwidth(torch.device("cpu"))
                append_lines(path, [{"row": "bandwidth", "id": prompt.id, "repeat": repeat, "rate": rate}])
            gc.collect()
            at = number % len(racers)
            for row in [*racers][at:] + [*racers][:at]:
                place = {"row": row, "id": prompt.id, "kind": prompt.kind, "repeat": repeat}
                if (row, prompt.id, repeat) not in done and (found := racers[row].answer(prompt, budget)):
                    append_lines(path, [place | {"prompt_tokens": len(prompt.ids)} | found])
                bar.update(task, advance=1, note=row)
