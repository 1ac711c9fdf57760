"""The training loop: packs in random order, AdamW, warm-up and cosine; killed at any moment it goes on where it was."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from specresearch.ranges import require
from specresearch.training import dataset
from specresearch.training.notes import curve_table
from specresearch.training.packs import Item, Library, Pack, grouped
from specresearch.training.settings import SCHEDULE
from specresearch.types import UserError


class Recipe(Protocol):
    """What is learned, and from what."""

    module: nn.Module
    steps: int  # tokens that it learns to guess from one feature

    def loss(self, pack: Pack, dice: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """-> what to minimise (the mean over its tokens), numbers to log"""
        ...

    def evaluate(self, library: Library, items: list[Item]) -> dict[str, float]:
        """Numbers on held-out dialogues."""
        ...

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        """As the drafter loads it."""
        ...


@dataclass(frozen=True)
class Schedule:
    epochs: int
    minutes: float | None  # if given: train so long, whatever the number of epochs
    lr: float
    warmup: int  # steps
    final: float  # last learning rate / lr
    clip: float
    weight_decay: float
    beta2: float
    pack_tokens: int  # least tokens in a pack
    accumulate: int  # packs in a step
    seed: int
    checkpoint_seconds: float
    evaluate_steps: int
    evaluate_dialogues: int

    def __post_init__(self) -> None:
        require(vars(self), SCHEDULE, "schedule.")


@dataclass
class Progress:
    step: int = 0  # optimiser steps done
    packs: int = 0  # of the current epoch
    epoch: int = 0
    tokens: int = 0  # seen, repetitions counted
    seconds: float = 0.0
    shards: list[str] = field(default_factory=list)  # what the current epoch is made of
    curve: list[dict[str, float]] = field(default_factory=list)  # held-out numbers against tokens seen
    complete: bool = False  # trained, written and tried in the loop


class Team:
    """The processes that torchrun started: each takes its share of a step's packs, and they add up their gradients."""

    def __init__(self) -> None:
        together = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if together else 0
        self.size = distributed.get_world_size() if together else 1

    def agreed(self, value: Any) -> Any:
        """The first process's `value`."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def add_up(self, weights: list[Tensor]) -> None:
        if self.size == 1:
            return
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        flat = torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
        distributed.all_reduce(flat)
        begin = 0
        for weight in weights:
            assert weight.grad is not None
            weight.grad.copy_(flat[begin : begin + weight.numel()].view_as(weight))
            begin += weight.numel()


class Trainer:
    """Trains `recipe.module` on the dialogues in `data`. Shards that appear meanwhile join in at the next epoch."""

    def __init__(self, recipe: Recipe, schedule: Schedule, data: Path, folder: Path):
        self.recipe, self.schedule, self.data, self.folder = recipe, schedule, data, folder
        self.team = Team()
        self.weights = {n: p for n, p in recipe.module.named_parameters() if p.requires_grad}
        matrices = [p for p in self.weights.values() if p.dim() > 1]
        vectors = [p for p in self.weights.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=schedule.lr, betas=(0.9, schedule.beta2))
        self.dice = torch.Generator(device=next(iter(self.weights.values())).device).manual_seed(
            schedule.seed + self.team.rank
        )
        self.progress = Progress()
        self.saved = time.monotonic()
        self.saved_at = folder / "checkpoint.pt"
        self.total = 0

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self, on_step: Callable[[Trainer, dict[str, float]], None] | None = None) -> None:
        """Until `schedule.epochs` are done. Leaves a checkpoint however it ends."""
        self.library = Library(self.data, self.progress.shards or None)  # of the epoch that a resumed run was in
        try:
            while self._done() < 1:
                self._epoch(on_step)
        finally:
            self.checkpoint()
        self.evaluate()
        self.checkpoint()
        self.export()

    def _epoch(self, on_step: Callable[[Trainer, dict[str, float]], None] | None) -> None:
        p, s = self.progress, self.schedule
        p.shards = self.team.agreed(p.shards if p.packs else [path.name for path in dataset.shards(self.data)])
        self.library = Library(self.data, p.shards)
        order = grouped(self.library.part(held_out=False), s.pack_tokens, random.Random(f"{s.seed} {p.epoch}"))
        at_once = s.accumulate * self.team.size
        self.total = math.ceil(s.epochs * len(order) / at_once)
        began, before = time.monotonic(), p.seconds
        if not p.curve:
            self.evaluate()
        while p.packs < len(order) and self._done() < 1:
            group = order[p.packs : p.packs + at_once]
            numbers = self._step(group, self._done(len(order)))
            p.packs, p.step = p.packs + len(group), p.step + 1
            p.seconds = self.team.agreed(before + time.monotonic() - began)
            if p.step % s.evaluate_steps == 0:
                self.evaluate()
                self.export()
            if time.monotonic() - self.saved > s.checkpoint_seconds:
                self.checkpoint()
            if on_step:
                on_step(self, numbers)
        if p.packs == len(order):
            p.epoch, p.packs = p.epoch + 1, 0

    def _done(self, packs: int = 0) -> float:
        """Share of the training that is behind us."""
        p, s = self.progress, self.schedule
        if s.minutes is not None:
            return p.seconds / (60 * s.minutes)
        return (p.epoch + (p.packs / packs if packs else 0)) / s.epochs

    def _step(self, group: list[list[Item]], done: float) -> dict[str, float]:
        s, p = self.schedule, self.progress
        rate = (
            s.lr
            * min(1.0, (p.step + 1) / max(1, s.warmup))
            * (s.final + (1 - s.final) * (1 + math.cos(math.pi * done)) / 2)
        )
        for options in self.optimiser.param_groups:
            options["lr"] = rate
        numbers: dict[str, float] = {"train/lr": rate}
        p.tokens += sum(len(item.dialogue.tokens) for items in group for item in items)
        own_share = group[self.team.rank :: self.team.size]
        for items in own_share:
            first: Tensor = next(iter(self.weights.values()))
            loss, own = self.recipe.loss(self.library.pack(items).to(first.device, first.dtype), self.dice)
            (loss / len(group)).backward()
            numbers["train/loss"] = numbers.get("train/loss", 0.0) + float(loss.detach()) / len(own_share)
            numbers |= own
        self.team.add_up(list(self.weights.values()))
        norm = nn.utils.clip_grad_norm_(self.weights.values(), s.clip)
        if not bool(torch.isfinite(norm)):
            raise UserError(f"the gradient is no number at step {p.step}: train anew with schedule.lr below {s.lr:g}")
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return numbers | {"train/gradient": float(norm)}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        if self.team.rank:
            return {}
        numbers = self.recipe.evaluate(self.library, self.held_out())
        p = self.progress
        if p.curve and p.curve[-1]["step"] == p.step:  # a resumed run's, or the last step's
            p.curve.pop()
        p.curve.append({"step": p.step, "tokens": p.tokens, "seconds": round(p.seconds), **numbers})
        return numbers

    def held_out(self) -> list[Item]:
        """What is evaluated on, greedy answers first."""
        items = self.library.part(held_out=True)
        items = sorted(items, key=lambda i: (i.dialogue.temperature != 0, i.shard.name, i.begin))
        return items[: self.schedule.evaluate_dialogues]

    # -- what stays --------------------------------------------------------------------------------------------------

    def export(self) -> None:
        if self.team.rank:
            return
        p = self.progress
        training = {"schedule": asdict(self.schedule), "steps": p.step, "tokens": p.tokens, "curve": p.curve}
        training["answer_tokens"] = self.library.answer_tokens(held_out=False)
        self.recipe.save(self.folder / "head", training)
        (self.folder / "head" / "curve.md").write_text(curve_table(p.curve), encoding="utf-8")

    def checkpoint(self) -> None:
        """Everything a resumed run needs to go on as if it had never stopped (with several processes, but for their draws)."""
        if self.team.rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self.folder / f"checkpoint.tmp{os.getpid()}"
        state = {"weights": self._own(), "optimiser": self.optimiser.state_dict()}
        torch.save(state | {"dice": self.dice.get_state(), "progress": asdict(self.progress)}, scratch)
        scratch.replace(self.saved_at)
        self.saved = time.monotonic()

    def _own(self) -> dict[str, Tensor]:
        """What the module does not take from the target: what is trained, and buffers."""
        frozen = {n for n, p in self.recipe.module.named_parameters() if not p.requires_grad}
        return {n: t for n, t in self.recipe.module.state_dict().items() if n not in frozen}

    def resume(self) -> None:
        path = self.saved_at
        try:
            state = torch.load(path, map_location=self.dice.device, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:80]}): train anew") from None
        own = self._own()
        if {n: p.shape for n, p in state["weights"].items()} != {n: p.shape for n, p in own.items()}:
            raise UserError(f"{path} is a checkpoint of another head: resume with the settings it was begun with")
        with torch.no_grad():
            for name, value in state["weights"].items():
                own[name].copy_(value)
        self.optimiser.load_state_dict(state["optimiser"])
        self.dice.set_state(state["dice"].cpu())
        self.progress = Progress(**state["progress"])
