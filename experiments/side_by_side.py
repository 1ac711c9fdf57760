"""What experiments share that compare drafters, trees or rules: one process, one target, every block of prompts by each in
turn. A variant is a name and its overrides; the first is plain decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from specresearch import cli, overrides
from specresearch.build import build, make, settings_of
from specresearch.metrics import Block, Line
from specresearch.provenance import provenance
from specresearch.results import read_finished
from specresearch.run import Run
from specresearch.turns import take_turns
from specresearch.types import Target

DRAFTERS = ("ngram", "medusa", "small_lm", "eagle")
PLAIN = "none"
Done = dict[str, tuple[list[Line], list[Block]]]  # by variant
Variants = Mapping[str, list[str]]


def begin(experiment: str, folder: Path, variants: Variants, given: list[str]) -> dict[str, Run]:
    """A run for each variant, all on one target, going on with what the folder holds. `NAME:key=value` is for one alone."""
    runs: dict[str, Run] = {}
    target: Target | None = None
    for name, chosen in variants.items():
        own = [a.removeprefix(f"{name}:") for a in given if ":" not in a.split("=")[0] or a.startswith(f"{name}:")]
        cfg = compose("config", overrides.prepare([f"experiment={experiment}", *chosen, *own]))
        parts = build(cfg, target)
        target, settings = parts.target, settings_of(cfg)
        (folder / name).mkdir(parents=True, exist_ok=True)
        runs[name] = Run(parts, make(cfg, "prompts")[: settings.limit], settings, folder / name, True, lambda *_: None)
    return runs


def facts(runs: dict[str, Run], given: list[str]) -> dict[str, Any]:
    where = provenance(runs[PLAIN].parts.target)
    return {
        "overrides": " ".join(given) or "none",
        "losslessness": {name: run.summary()["lossless"]["verdict"] for name, run in runs.items() if name != PLAIN},
        "where": f"{where['time'][:10]}, {where['device']['name']}, {where['device']['threads']} threads, "
        f"{where['device']['dtype']}, torch {where['versions']['torch']}, "
        f"transformers {where['versions']['transformers']}",
    }


def notes(folder: Path, done: Done) -> str:
    """Under the tables: what was run, whether it was lossless, and where."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    verdicts = ", ".join(f"{name} {verdict}" for name, verdict in about["losslessness"].items())
    lines = done[PLAIN][0]
    count = f"{len(lines)} answers, {sum(len(line['output_ids']) for line in lines)} tokens"
    return "\n".join(
        [f"- overrides: {about['overrides']}; {count}", f"- losslessness: {verdicts}", f"- {about['where']}"]
    )


def markdown(title: str, names: list[str], rows: dict[str, list[str]]) -> str:
    """A table with a column for each of `names` and a row for each label."""
    head = [f"| {title} | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    return "\n".join([*head, *(f"| {label} | " + " | ".join(cells) + " |" for label, cells in rows.items())])


def drafters(arguments: list[str]) -> dict[str, list[str]]:
    """Each of `drafters=a,b` is a variant."""
    given = [a for a in arguments if a.startswith("drafters=")]
    names = given[-1].partition("=")[2].split(",") if given else DRAFTERS
    return {name: [f"drafter={name}"] for name in names}


def main(experiment: str, variants: Variants, tables: Callable[[Done], list[str]], arguments: list[str]) -> None:
    """Run what is left of the experiment in its folder, and print its tables and notes."""
    given = [a for a in arguments if not a.startswith(("out=", "drafters="))]
    out = [a.partition("=")[2] for a in arguments if a.startswith("out=")]
    folder = Path(out[-1] if out else f"runs/{experiment}/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    variants = {PLAIN: [f"drafter={PLAIN}"], **variants}
    try:
        with initialize_config_dir(overrides.CONF, version_base="1.3"):
            runs = begin(experiment, folder, variants, given)
            take_turns(runs)
        (folder / "about.json").write_text(json.dumps(facts(runs, given)), encoding="utf-8")
    except KeyboardInterrupt:
        print(f"interrupted: go on with  out={folder}  and the same arguments", file=sys.stderr)
        sys.exit(cli.INTERRUPTED)
    except Exception as error:
        sys.exit(cli.report(error))
    done = {name: read_finished(folder / name) for name in variants}
    text = "\n\n".join([*tables(done), notes(folder, done)])
    print(f"\n{text}\n\nwritten to {folder}")
