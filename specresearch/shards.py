"""Data parallel: each rank answers some blocks of questions, in a folder of its own; rank 0 brings all into one run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specresearch import parallel
from specresearch.build import build, make, settings_of
from specresearch.conversations import Settings
from specresearch.parallel import Group
from specresearch.results import collect
from specresearch.run import Run
from specresearch.types import UserError

TO_STOP = 10.0  # seconds that the others have for it after an error or a Ctrl-C
COUNTER = "answers"  # of the followers, in the store that all ranks see


def require_supported(arguments: Sequence[str], command: str, group: Group) -> None:
    """Raises UserError for what several processes cannot do together."""
    flags = {"-m", "--multirun"} & {*arguments}
    start = f"torchrun --nproc-per-node={group.world} -m specresearch"
    if command != "config":
        raise UserError(f"this command runs in one process: leave torchrun out; runs alone are shared ({start} ...)")
    if flags and any(argument.startswith("hydra/launcher=") for argument in arguments):
        raise UserError("under torchrun the jobs of a sweep run one after the other: leave hydra/launcher out")
    if flags and not any(argument.startswith("target.tp=") for argument in arguments):
        raise UserError(
            f"a sweep does not share its prompts: use  {start} target.tp={group.world} -m ...  for a target over "
            f"{group.world} processes, or leave torchrun or -m out"
        )


def recover(folder: Path) -> None:
    """Take over what the ranks of a try that was killed had finished."""
    if any(folder.glob("rank-*")):
        collect(folder)


class Sharing:
    """Rank 0's part of a run whose questions are shared."""

    def __init__(self, group: Group):
        self.group = group

    @property
    def others(self) -> int:
        """Answers that the followers have finished."""
        return int(self.group.store.add(COUNTER, 0))

    def execute(self, run: Run, cfg: DictConfig) -> None:
        """Answer what is left, all ranks side by side. Whatever happens, finished blocks of all ranks end up in the run."""
        left, world = run.todo(), self.group.world
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        self.group.order(answer, config, str(run.folder), [left[rank::world] for rank in range(world)])
        complete = False
        try:
            run.execute(left[::world])
            self.group.wait(float("inf"), lambda: run.on_turn({"steps": []}, run.lines, run.blocks))
            complete = True
        finally:
            if not complete:
                self.group.stop()
                self.group.broken |= not self.group.wait(0 if self.group.lost else TO_STOP)
            collect(run.folder)
            run.reload()


def sharing(cfg: DictConfig, settings: Settings, sweep: Path | None) -> Sharing | None:
    """How the questions are shared; None for one process, or for one target on all of them. Raises UserError."""
    group = parallel.current()
    if group is None or cfg.target.get("tp", 1) != 1:
        return None
    if sweep is not None:
        raise UserError(f"a sweep under torchrun needs target.tp={group.world}")
    if settings.log or settings.trace.get("dense"):
        key = "log=whitebox" if settings.log else "trace.dense=true"
        raise UserError(f"{key} wants all answers in one process: leave torchrun out")
    return Sharing(group)


def answer(group: Group, config: dict[str, Any], folder: str, shares: Sequence[Sequence[int]]) -> None:
    """A follower's part: its blocks, as any run answers them."""
    cfg = OmegaConf.create(config)
    settings = settings_of(cfg)
    questions = make(cfg, "prompts")[: settings.limit]
    own = Path(folder) / f"rank-{group.rank}"
    own.mkdir(exist_ok=True)

    def count(*_: Any) -> None:
        group.store.add(COUNTER, 1)

    def heed(_: Any) -> None:
        if group.stopped():
            raise KeyboardInterrupt

    run = Run(build(cfg), questions, settings, own, False, count, heed, rank=group.rank)
    with suppress(KeyboardInterrupt):  # what is finished is kept
        run.execute(shares[group.rank])
