"""Drafters side by side: one process, one target, every block of prompts answered by each drafter in turn and plainly.

    python experiments/drafters.py [out=FOLDER] [drafters=ngram,medusa,small_lm,eagle] [overrides ...]

Overrides (`temperature=1 tree.size=4 limit=28 ...`) hold for all; `DRAFTER:key=value` for one. A FOLDER that was begun is
gone on with, or only read if it is complete. The order changes from block to block, so what slows the machine down slows
all; `experiments/drafters.md` holds recorded results.
"""

from __future__ import annotations

import itertools
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from specresearch import cli, console, overrides
from specresearch.build import build, make, settings_of
from specresearch.metrics import Block, Line, acceptance, rate, ratio
from specresearch.provenance import provenance
from specresearch.results import read_finished
from specresearch.run import Run
from specresearch.types import Target

DRAFTERS = ("ngram", "medusa", "small_lm", "eagle")
PLAIN = "none"
Done = dict[str, tuple[list[Line], list[Block]]]  # by drafter


def begin(folder: Path, drafters: list[str], given: list[str]) -> dict[str, Run]:
    """A run for each drafter, all on one target, going on with what the folder holds."""
    runs: dict[str, Run] = {}
    target: Target | None = None
    for name in drafters:
        own = [a.removeprefix(f"{name}:") for a in given if ":" not in a.split("=")[0] or a.startswith(f"{name}:")]
        cfg = compose("config", overrides.prepare(["experiment=drafters", f"drafter={name}", *own]))
        parts = build(cfg, target)
        target, settings = parts.target, settings_of(cfg)
        (folder / name).mkdir(parents=True, exist_ok=True)
        runs[name] = Run(parts, make(cfg, "prompts")[: settings.limit], settings, folder / name, True, lambda *_: None)
    return runs


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


# -- what was measured, from the lines and the blocks alone ----------------------------------------------------------------


def accepted(done: Done, name: str, kind: str | None) -> str:
    length = acceptance([line for line in done[name][0] if kind in (None, line["kind"])])["mean_accepted_length"]
    return console.number(length)


def gain(done: Done, name: str, kind: str | None) -> str:
    """Tokens per second against plain decoding; by kind only where blocks hold one kind."""
    own, plain = (
        rate((b for b in done[n][1] if kind is None or b["kinds"] == [kind]), "speculative") for n in (name, PLAIN)
    )
    return console.number(ratio(own, plain) if own and plain else None)


def table(title: str, done: Done, cell: Any) -> str:
    names = [name for name in done if name != PLAIN]
    kinds = dict.fromkeys(line["kind"] for line in done[PLAIN][0])
    rows = [f"| {title} | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for label, kind in [*((k, k) for k in kinds), ("pooled", None)]:
        rows.append(f"| {label} | " + " | ".join(cell(done, name, kind) for name in names) + " |")
    return "\n".join(rows)


def costs(done: Done) -> str:
    """What a step costs, in steps of plain decoding: drafting (c), the pass over the tree, the rest."""
    plain = step_times(done[PLAIN][1])
    unit = sum(plain.values())
    rows = ["| drafter | draft cost c | tree pass | rest | draft's share of a step |", "|---|---:|---:|---:|---:|"]
    for name in done:
        own = step_times(done[name][1])
        draft, target = own.pop("draft"), own.pop("target")
        rest = sum(own.values())
        share = draft / (draft + target + rest)
        rows.append(f"| {name} | {draft / unit:.2f} | {target / unit:.2f} | {rest / unit:.2f} | {share:.0%} |")
    return "\n".join(rows)


def step_times(blocks: list[Block]) -> dict[str, float]:
    """Seconds of a target pass and what belongs to it, by part; prefill left out."""
    passes = sum(b["speculative"]["target_passes"] for b in blocks)
    parts = ("draft", "target", "verify", "commit")
    times = {part: sum(b["speculative"]["time"].get(part, 0.0) for b in blocks) / passes for part in parts}
    whole = sum(b["speculative"]["seconds"] - b["speculative"]["time"].get("prefill", 0.0) for b in blocks) / passes
    return times | {"other": max(whole - sum(times.values()), 0.0)}


def facts(runs: dict[str, Run], given: list[str]) -> dict[str, Any]:
    where = provenance(runs[PLAIN].parts.target)
    return {
        "overrides": " ".join(given) or "none",
        "losslessness": {name: run.summary()["lossless"]["verdict"] for name, run in runs.items() if name != PLAIN},
        "where": f"{where['time'][:10]}, {where['device']['name']}, {where['device']['threads']} threads, "
        f"{where['device']['dtype']}, torch {where['versions']['torch']}, "
        f"transformers {where['versions']['transformers']}",
    }


def report(folder: Path, drafters: list[str]) -> str:
    done = {name: read_finished(folder / name) for name in drafters}
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    verdicts = ", ".join(f"{name} {verdict}" for name, verdict in about["losslessness"].items())
    lines = done[PLAIN][0]
    count = f"{len(lines)} answers, {sum(len(line['output_ids']) for line in lines)} tokens"
    notes = [f"- overrides: {about['overrides']}; {count}", f"- losslessness: {verdicts}", f"- {about['where']}"]
    tables = [table("accepted length", done, accepted), table("tokens/s, plain = 1", done, gain), costs(done)]
    return "\n\n".join([*tables, "\n".join(notes)])


def main(arguments: list[str]) -> None:
    own = dict(a.split("=", 1) for a in arguments if a.startswith(("out=", "drafters=")))
    given = [a for a in arguments if not a.startswith(("out=", "drafters="))]
    folder = Path(own.get("out") or f"runs/drafters/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    drafters = [PLAIN, *own.get("drafters", ",".join(DRAFTERS)).split(",")]
    try:
        with initialize_config_dir(overrides.CONF, version_base="1.3"):
            runs = begin(folder, drafters, given)
            take_turns(runs)
        (folder / "about.json").write_text(json.dumps(facts(runs, given)), encoding="utf-8")
    except KeyboardInterrupt:
        print(f"interrupted: go on with  out={folder}  and the same arguments", file=sys.stderr)
        sys.exit(cli.INTERRUPTED)
    except Exception as error:
        sys.exit(cli.report(error))
    print(f"\n{report(folder, drafters)}\n\nwritten to {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
