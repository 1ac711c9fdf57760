"""The tree of most tokens per second: makes the search of conf/experiment/tune.yaml, or reads one, and prints its table.

This is Optuna's search, by whole runs; `python -m specresearch.tune` records once and predicts.

    python experiments/tune.py [SWEEP_DIR | overrides ...]

Speeds of different jobs were measured at different times: `speedup`, against plain decoding in the same job, is the fairer one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from specresearch.console import number
from specresearch.sweeps import SweepJob, best, jobs, varied


def make(overrides: list[str]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tune-"))
    command = [sys.executable, "-m", "specresearch", "-m", "experiment=tune", f"hydra.sweep.dir={folder}", *overrides]
    subprocess.run(command, check=True)
    return folder


def table(found: Sequence[SweepJob]) -> str:
    """Markdown: one row a job, the fastest first."""
    keys = varied(found)
    rows = ["| " + " | ".join([*keys, "accepted length", "tokens/s", "speedup", "losslessness"]) + " |"]
    rows.append("|" + "---:|" * (len(keys) + 3) + "---|")
    done = [(job, job.summary) for job in found if job.summary]
    for job, s in sorted(done, key=lambda pair: -(pair[1]["tokens_per_second"] or 0.0)):
        cells = [job.overrides.get(key, "-") for key in keys]
        cells += [number(s[key]) for key in ("mean_accepted_length", "tokens_per_second", "speedup")]
        rows.append("| " + " | ".join([*cells, job.verdict]) + " |")
    return "\n".join(rows)


def main(arguments: list[str]) -> None:
    given = Path(arguments[0]) if len(arguments) == 1 and "=" not in arguments[0] else None
    found = jobs(given or make(arguments))
    if not found:
        sys.exit(f"error: {given} is not the folder of a sweep")
    top = best(found)
    print(table(found) + (f"\n\nbest {top[1]}: `{top[0].command()}`" if top else ""))


if __name__ == "__main__":
    main(sys.argv[1:])
