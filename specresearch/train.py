"""`python -m specresearch.train drafter=eagle target=smollm2`: make on-policy data, train a draft head on it.

Exit status: 0, 1 for an error, 130 after Ctrl-C; `resume=DIR` goes on after that, or after a kill.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from specresearch import cli, commands, console, overrides
from specresearch.build import engine, make
from specresearch.decode import Decoder, Job
from specresearch.overrides import CONF
from specresearch.ranges import MAPPING, require
from specresearch.tracking import Tracker
from specresearch.training import data
from specresearch.training.features import add_features
from specresearch.training.packs import Library
from specresearch.training.settings import DATA, DRAFTER
from specresearch.training.trainer import Schedule, Team, Trainer
from specresearch.types import UserError

STAGES = ("all", "data", "features", "check")


@hydra.main(config_path=CONF, config_name="train", version_base="1.3")
@cli.guarded("train")
def job(cfg: DictConfig) -> None:
    if cfg.stage not in STAGES:
        raise UserError(f"stage={cfg.stage} is unknown: use {', '.join(STAGES)}")
    folder = Path(HydraConfig.get().runtime.output_dir)
    resumed = cfg.resume is not None  # said on the command line alone: the saved configuration is that of the beginning
    cfg = overrides.frozen(cfg, folder)
    settings: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    wanted = settings["data"]
    require(settings, dict.fromkeys(("data", "schedule", "drafter"), MAPPING))
    require(wanted, DATA, "data.")
    require(settings["drafter"], DRAFTER, "drafter.")
    schedule = Schedule(seed=cfg.seed, **settings["schedule"])
    target = make(cfg, "target")
    where = data.folder_of(target, wanted["folder"])
    if cfg.stage == "check":
        checked(data.check(target, where))
        return
    with (
        going_on(folder, f"whole shards of data in {where} and the last checkpoint are kept"),
        console.progress() as bar,
    ):
        if cfg.stage == "features":
            data.require(target, where)
            task = bar.add_task("features", total=None, note="")
            add_features(target, where, data.taps_of(target), lambda n, of: bar.update(task, completed=n, total=of))
            return
        team = together(target.device)
        task = bar.add_task("making data", total=wanted["tokens"], note="")
        if team.rank == 0:
            data.make(target, wanted, cfg.seed, lambda g: bar.update(task, completed=g.book.counts["answer_tokens"]))
        where = team.agreed(where)
        bar.stop()
        if cfg.stage == "all":
            train(cfg, schedule, target, where, folder, resumed)


@contextmanager
def going_on(folder: Path, kept: str) -> Iterator[None]:
    """On Ctrl-C: what is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {kept}; go on with  {commands.go_on(folder, 'specresearch.train')}", file=sys.stderr)
        raise


def together(device: torch.device) -> Team:
    """Join the processes that torchrun started, if it did."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not torch.distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(days=1))  # one makes the data, the others wait
    team = Team()
    console.out.quiet = team.rank > 0
    return team


def checked(found: dict[str, Any]) -> None:
    print(f"{found['train']} dialogues to train on, {found['held_out']} held out, {found['in_both']} in both")
    print(", ".join(f"{key} {value}" for key, value in found["counts"].items()))
    print(f"{len(found['bad'])} dialogues share 8 words in a row with an evaluation prompt")
    for line in found["bad"][:10]:
        print(f"  {line['kind']}: {line['text']!r}")
    if found["bad"] or found["in_both"]:
        raise UserError("the data is not clean: delete the shards that these dialogues are in")


def train(cfg: DictConfig, schedule: Schedule, target: Any, where: Path, folder: Path, resumed: bool) -> None:
    torch.manual_seed(cfg.seed)
    library = Library(where)
    if not library.part(held_out=False):
        raise UserError(f"{where} holds too few dialogues, none to train on: raise data.tokens or give more prompts")
    if not any(item.dialogue.temperature == 0 for item in library.part(held_out=True)):
        console.note(
            "warning: no greedy answer is held out (about one dialogue in 25 is): there will be no held-out curve"
        )
    recipe = make(cfg, "drafter", target=target, library=library)
    trainer = Trainer(recipe, schedule, where, folder)
    if resumed and trainer.saved_at.exists():  # else it was interrupted while the data was made
        trainer.resume()
        if trainer.progress.complete:
            raise UserError(f"resume={folder} is complete: use it with {key_of(cfg.drafter.name)}={folder}/head")
    tracker = make(cfg, "tracker") if trainer.team.rank == 0 else Tracker()
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    tracker.start(settings, folder, group=None, tags=["train", cfg.drafter.name, target.name])
    place = None
    try:
        with console.progress() as bar:
            task = bar.add_task("training", total=None, note="")

            def on_step(t: Trainer, numbers: dict[str, float]) -> None:
                length = t.progress.curve[-1].get("held_out/walk") if t.progress.curve else None
                note = f"loss {numbers['train/loss']:.3f}  held-out length {console.number(length)}"
                bar.update(task, total=t.total, completed=t.progress.step, note=note)
                tracker.log(numbers | held_out(t), step=t.progress.step)

            trainer.run(on_step if trainer.team.rank == 0 else None)
            if trainer.team.rank == 0:
                bar.update(task, description="serving")
                tracker.log(serve(trainer, cfg.drafter.name, target), step=trainer.progress.step)
                trainer.progress.complete = True
                trainer.checkpoint()
    finally:
        place = tracker.finish({})
    console.out.print(f"[bold]written to[/]  {folder}/head   use it with  {key_of(cfg.drafter.name)}={folder}/head")
    if place:
        console.out.print(place, markup=False)


def key_of(name: str) -> str:
    """The key that a drafter is told its head by."""
    return f"drafter.{'id' if name == 'small_lm' else 'ckpt'}"


def serve(trainer: Trainer, name: str, target: Any) -> dict[str, float]:
    """Draft with the head that was written: the loop must accept on held-out prompts what walking their answers predicts.

    Else training and drafting differ, in positions, features or cache. Greedy answers, a chain as deep as was trained.
    """
    items = [i.dialogue for i in trainer.held_out() if i.dialogue.temperature == 0]
    if not items:
        return {}
    where = f"{key_of(name)}={commands.quoted(str(trainer.folder / 'head'))}"
    chosen = [f"drafter={name.removesuffix('1')}", where, "tree=chain", f"tree.depth={trainer.recipe.steps}"]
    parts, rows = engine(*chosen, target=target).parts, min(4, len(items))
    capacity = max(len(d.tokens) for d in items)
    for part in (parts.target, parts.drafter):
        part.reserve(rows, capacity, max(parts.policy.asked, parts.policy.size))
    decoder = Decoder(parts, batch=rows, capacity=capacity, seed=0, decode=target.text, stop=[])
    jobs = [Job(i, "held out", 0, d.tokens[: d.answer], len(d.tokens) - d.answer) for i, d in enumerate(items)]
    turns = [e.turn for e in decoder.run(iter(jobs)) if e.done]
    emitted = [step["emitted"] for turn in turns for step in turn.steps]
    loop = {"held_out/loop": sum(emitted) / max(1, len(emitted))}
    last = trainer.progress.curve[-1]
    predicted, measured = last["held_out/walk"], loop["held_out/loop"]
    console.out.print(
        f"{len(turns)} held-out answers, chain of {trainer.recipe.steps}: accepted length "
        f"{predicted:.3f} predicted by their texts, {measured:.3f} measured by the loop"
    )
    if abs(measured - predicted) > 0.05 * predicted:
        console.note(
            "warning: they differ by more than 5 %: the dialogues were written by another target or in another precision, "
            "or training and drafting differ"
        )
    last.update(loop)
    trainer.export()
    return loop


def held_out(trainer: Trainer) -> dict[str, float]:
    """The held-out numbers, at the step that made them."""
    last = trainer.progress.curve[-1] if trainer.progress.curve else {}
    return (
        {k: v for k, v in last.items() if k.startswith("held_out/")}
        if last.get("step") == trainer.progress.step
        else {}
    )


def main() -> None:
    """Entry point of `python -m specresearch.train`."""
    cli.run(job, "train")


if __name__ == "__main__":
    main()
