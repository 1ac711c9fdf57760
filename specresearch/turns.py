"""Several runs in one process, in turns, so that the machine's moods meet all of them alike."""

from __future__ import annotations

import itertools

from specresearch import console
from specresearch.run import Run


def take_turns(runs: dict[str, Run]) -> None:
    """A block of each in an order that rotates. Those that are behind, after an interruption, catch up first."""
    left = {name: run.by_block() for name, run in runs.items()}
    total = sum(len(run.questions) for run in runs.values())
    with console.progress() as bar:
        task = bar.add_task("decoding", total=total, note="", completed=sum(len(run.blocks) for run in runs.values()))
        for number in itertools.count(min(len(run.blocks) for run in runs.values())):
            waiting = [name for name, run in runs.items() if len(run.blocks) == number < len(run.questions)]
            at = number % max(len(waiting), 1)
            for name in waiting[at:] + waiting[:at]:
                next(left[name])
                bar.update(task, advance=1, note=name)
            if all(len(run.blocks) == len(run.questions) for run in runs.values()):
                return
