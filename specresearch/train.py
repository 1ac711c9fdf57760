"""`python -m specresearch.train drafter=eagle target=smollm2`: make on-policy data, train a draft head on it.

Exit status: 0, 1 for an error, 130 after Ctrl-C; `resume=DIR` goes on after that, or after a kill.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from specresearch import cli, console, overrides
from specresearch.build import engine, make
from specresearch.decode import Decoder, Job
from specresearch.overrides import CONF
from specresearch.tracking import Tracker
from specresearch.training import data
from specresearch.training.features import add_features
from specresearch.training.packs import Library
from specresearch.training.trainer import Schedule, Team, Trainer
from specresearch.types import UserError

STAGES = ("all", "data", "features", "check")


@hydra.main(config_path=CONF, config_name="train", version_base="1.3")
@cli.guarded("train")
def job(cfg: DictConfig) -> None:
    if cfg.stage not in STAGES:
        raise UserError(f"stage={cfg.stage} is unknown: use {', '.join(STAGES)}")
    folder = Path(HydraConfig.get().runtime.output_dir)
    cfg = overrides.frozen(cfg, folder)
    target = make(cfg, "target")
    wanted: Any = OmegaConf.to_container(cfg.data, resolve=True, throw_on_missing=True)
    if cfg.stage == "check":
        checked(data.check(target, data.folder_of(target, wanted["folder"])))
        return
    if cfg.stage == "features":
        with console.progress() as bar:
            task = bar.add_task("features", total=None, note="")
            where = data.folder_of(target, wanted["folder"])
            add_features(target, where, data.taps_of(target), lambda n, of: bar.update(task, completed=n, total=of))
        return
    team = together(target.device)
    with console.progress() as bar:
        task = bar.add_task("making data", total=wanted["tokens"], note="")
        if team.rank == 0:
            data.make(target, wanted, cfg.seed, lambda g: bar.update(task, completed=g.book.counts["answer_tokens"]))
    where = team.agreed(data.folder_of(target, wanted["folder"]))
    if cfg.stage == "all":
        train(cfg, target, where, folder)


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


def train(cfg: DictConfig, target: Any, where: Path, folder: Path) -> None:
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    torch.manual_seed(cfg.seed)
    recipe = instantiate(cfg.drafter, _convert_="all", target=target, library=Library(where))
    trainer = Trainer(recipe, Schedule(seed=cfg.seed, **settings["schedule"]), where, folder)
    if cfg.resume:
        trainer.resume()
    tracker = make(cfg, "tracker") if trainer.team.rank == 0 else Tracker()
    tracker.start(settings, folder, group=None, tags=["train", cfg.drafter.name, target.name])
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
    except KeyboardInterrupt:
        print(f"interrupted: go on with  python -m specresearch.train resume={folder}", file=sys.stderr)
        raise
    finally:
        place = tracker.finish({})
    console.out.print(f"[bold]written to[/]  {folder}/head   use it with  drafter.ckpt={folder}/head")
    if place:
        console.out.print(place, markup=False)


def serve(trainer: Trainer, name: str, target: Any) -> dict[str, float]:
    """Draft with the head that was written: the loop must accept on held-out prompts what walking their answers predicts.

    Else training and drafting differ, in positions, features or cache. Greedy answers, a chain as deep as was trained.
    """
    items = [i.dialogue for i in trainer.held_out() if i.dialogue.temperature == 0]
    if not items:
        return {}
    where = f"drafter.{'id' if name == 'small_lm' else 'ckpt'}={overrides.quoted(str(trainer.folder / 'head'))}"
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
    console.out.print(
        f"{len(turns)} held-out answers, chain of {trainer.recipe.steps}: accepted length "
        f"{last['held_out/walk']:.3f} predicted by their texts, {loop['held_out/loop']:.3f} measured by the loop"
    )
    last.update(loop)
    trainer.checkpoint()
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
