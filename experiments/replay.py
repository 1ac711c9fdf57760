"""Replays put to the test: one run with a large tree is recorded, smaller trees are foretold from it, then run.

    python experiments/replay.py [out=FOLDER] [drafters=ngram,eagle] [overrides ...]

All runs of a drafter take turns, prompt by prompt, so that their speeds can be compared. A FOLDER that was begun is gone on
with, or only read if it is complete; `experiments/replay.md` holds a recorded result.
"""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specresearch import cli, console, overrides
from specresearch.build import build, make, settings_of
from specresearch.metrics import Line
from specresearch.provenance import provenance
from specresearch.replay import recordings, replay, wish_of
from specresearch.results import read, read_lines
from specresearch.run import Run
from specresearch.types import Target
from specresearch.whatif.answer import Answer
from specresearch.whatif.price import prices_of

LARGE = "recorded"
SMALLER = {
    "6/4/12": ["tree.depth=6", "tree.topk=4", "tree.size=12"],
    "4/4/8": ["tree.depth=4", "tree.topk=4", "tree.size=8"],
    "3/2/6": ["tree.depth=3", "tree.topk=2", "tree.size=6"],
    "3/1/4": ["tree.depth=3", "tree.topk=1", "tree.size=4"],
}


def make_runs(folder: Path, drafter: str, given: list[str], target: Target | None) -> Target:
    """The recorded run and the smaller ones, block by block in turn; each leaves a folder like any run's."""
    runs: dict[str, Run] = {}
    configs: dict[str, Any] = {}
    for name, tree in {LARGE: ["trace.dense=true"], **SMALLER}.items():
        own = [
            f"drafter={drafter}",
            "trace.dense=false",
            *given,
            *tree,
            *([] if name == LARGE else ["baseline=false", "check=false"]),
        ]
        cfg = compose("config", overrides.prepare(["experiment=replay", *own]))
        parts = build(cfg, target)
        target, settings, place = parts.target, settings_of(cfg), folder / drafter / name.replace("/", "-")
        place.mkdir(parents=True, exist_ok=True)
        runs[name] = Run(parts, make(cfg, "prompts")[: settings.limit], settings, place, True, lambda *_: None)
        configs[name] = OmegaConf.to_container(cfg, resolve=True)
    turns = [run.by_block() for run in runs.values()]
    with console.progress() as bar:
        task = bar.add_task(drafter, total=sum(len(run.questions) - len(run.blocks) for run in runs.values()), note="")
        while left := [turn for turn in turns if next(turn, None) is not None]:
            turns = left
            bar.update(task, advance=len(left))
    for name, run in runs.items():
        summary = run.summary() | {"config": configs[name], "provenance": provenance(run.parts.target)}
        cli.save(run.folder / "summary.json", summary)
    assert target is not None
    return target


def foretold(path: Path, trees: list[list[str]]) -> list[Answer]:
    (own,) = recordings([str(path)])
    prices = prices_of(own.run, own.policy.depth, own.policy.size)
    return [replay(own, wish_of([str(path), *tree]), prices)[0][1] for tree in trees]


def table(folder: Path, drafter: str) -> str:
    """Markdown: one row a tree; 3/2/6 is depth 3, topk 2, size 6."""
    dense, plain = (foretold(folder / drafter / LARGE / f"{n}.jsonl", [*SMALLER.values()]) for n in ("dense", "trace"))
    rows = [
        f"| {drafter} | accepted length | dense replay | ordinary trace | off by | tokens/s | foretold |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, exact, rough in zip(SMALLER, dense, plain):
        real = read(folder / drafter / name.replace("/", "-")).summary
        length, guess = real["mean_accepted_length"], rough.mean_accepted_length or 0.0
        same = (
            "=" if {k: int(n) for k, n in exact.histogram.items()} == real["accepted_length_histogram"] else "differs"
        )
        rows.append(
            f"| {name} | {length:.3f} | {console.number(exact.mean_accepted_length, 3)} {same} | {guess:.3f} | "
            f"{guess / length - 1:+.1%} | {real['tokens_per_second']:.1f} | {console.number(exact.tokens_per_second, 1)} |"
        )
    return "\n".join(rows)


def facts(folder: Path, drafters: list[str]) -> str:
    """What the recording cost, and where it was made."""
    lines = []
    for drafter in drafters:
        run = read(folder / drafter / LARGE)
        places = sum(len(line["drafts"]) for line in read_lines(run.folder / "dense.jsonl"))
        size = (run.folder / "dense.jsonl").stat().st_size / 1e3
        took = sum(block["dense"]["seconds"] for block in run.blocks)
        plain = sum(block["baseline"]["seconds"] for block in run.blocks if "baseline" in block)
        times = f", {took / plain:.1f} times plain decoding" if plain else ""
        lines.append(f"- {drafter}: a dense trace takes {size / places:.2f} kB a token and {took:.0f} s{times}")
    where = run.summary["provenance"]
    device, versions = where["device"], where["versions"]
    date = datetime.fromisoformat(where["time"]).date()
    lines.append(
        f"- {date}, {device['name']}, {device['threads']} threads, {device['dtype']}, torch {versions['torch']}"
    )
    return "\n".join(lines)


def same_steps(folder: Path, drafter: str) -> list[Line]:
    """Answers of the smaller runs that differ from the recorded text: there a near-tie was decided otherwise."""
    own = {line["id"]: line["output_ids"] for line in read_lines(folder / drafter / LARGE / "dense.jsonl")}
    runs = [read(folder / drafter / name.replace("/", "-")) for name in SMALLER]
    return [line for run in runs for line in run.lines if line["output_ids"] != own[line["id"]]]


def main(arguments: list[str]) -> None:
    named = dict(a.split("=", 1) for a in arguments if a.startswith(("out=", "drafters=")))
    given = [a for a in arguments if not a.startswith(("out=", "drafters="))]
    folder = Path(named.get("out") or f"runs/replay/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    drafters = named.get("drafters", "ngram,eagle").split(",")
    try:
        with initialize_config_dir(overrides.CONF, version_base="1.3"):
            target: Target | None = None
            for drafter in drafters:
                target = make_runs(folder, drafter, given, target)
        for drafter in drafters:
            print(f"\n{table(folder, drafter)}\n")
            if other := same_steps(folder, drafter):
                print(f"- {len(other)} answers differ from the recorded ones: near-ties decided otherwise")
        print(facts(folder, drafters))
    except KeyboardInterrupt:
        console.note(f"interrupted: go on with  python experiments/replay.py out={folder} {' '.join(given)}")
        sys.exit(cli.INTERRUPTED)
    except Exception as error:
        sys.exit(cli.report(error))


if __name__ == "__main__":
    main(sys.argv[1:])
