"""What the kernels compiled for CPUs save in a pass of the target: `kernels=auto` beside `kernels=torch`, by rows.

    python experiments/passes.py [rounds=25] [target=...]

Two models with the same weights take turns, pass by pass, behind 64 cached tokens; medians in ms. The floor is the weights, as
they are held, over the read bandwidth of the same round (`peer/machine.py`).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from peer.machine import bandwidth, weight_bytes
from peer.plain_models import Models
from swept import markdown

from specresearch import cli, console
from specresearch.kernels import cpu
from specresearch.types import UserError

PREFIX, ROWS = 64, (1, 2, 3, 4, 6, 8, 12, 16, 32)
WAYS = ("torch", "auto")


def passes(target: torch.nn.Module, rows: int) -> Callable[[], object]:
    target.reserve(1, PREFIX, max(ROWS))
    tokens, length = torch.zeros(1, rows, dtype=torch.long), torch.tensor([PREFIX])
    mask = torch.ones(1, rows, rows, dtype=torch.bool).tril()
    return lambda: target.run(tokens, PREFIX + torch.arange(rows)[None], length, mask, PREFIX)


@torch.inference_mode()
def compared(targets: dict[str, torch.nn.Module], rows: int, rounds: int) -> list[str]:
    works = {way: passes(target, rows) for way, target in targets.items()}
    times: dict[str, list[float]] = {way: [] for way in works}
    for number in range(rounds + 2):
        for way, work in works.items():
            begun = time.perf_counter()
            work()
            if number >= 2:
                times[way].append(time.perf_counter() - begun)
    spent = {way: statistics.median(own) for way, own in times.items()}
    floor = weight_bytes(targets["auto"].model) / bandwidth(torch.device("cpu"))
    numbers = [*(f"{1e3 * spent[way]:.1f}" for way in WAYS), f"{spent['auto'] / spent['torch']:.2f}"]
    return [str(rows), *numbers, f"{1e3 * floor:.3g}", f"{spent['auto'] / floor:.2f}"]


def main(arguments: Sequence[str]) -> None:
    rounds = next((a.partition("=")[2] for a in arguments if a.startswith("rounds=")), "25")
    given = [a for a in arguments if not a.startswith("rounds=")]
    try:
        if not rounds.isdecimal() or int(rounds) < 1:
            raise UserError(f"rounds={rounds}: use a whole number of at least 1")
        if not cpu.serves():
            raise UserError("nothing is compiled on this machine: an x86 CPU with AVX2 and a C++ compiler are needed")
        targets = {way: Models(["target.device=cpu", *given, f"kernels={way}"]).target for way in WAYS}
        with console.progress() as bar:
            task = bar.add_task("measuring", total=len(ROWS), note="")
            lines = []
            for rows in ROWS:
                lines.append(compared(targets, rows, int(rounds)))
                bar.update(task, advance=1, note=f"{rows} rows")
    except KeyboardInterrupt:
        sys.exit(cli.INTERRUPTED)
    except Exception as error:
        sys.exit(cli.report(error))
    print(
        markdown(["rows", "kernels=torch, ms", "kernels=auto, ms", "ratio", "floor, ms", "kernels=auto / floor"], lines)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
