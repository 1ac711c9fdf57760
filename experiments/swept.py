"""What experiments share that read a sweep: make it if no folder is given, print a table, draw a figure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from specresearch import cli
from specresearch.report.svg import WIDTH, Axes, chart, dot, frame, line, tag, text
from specresearch.results import Results, find

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito: told apart by all eyes
STYLE = "text{font:11px sans-serif;fill:#444}.rule{stroke:#ddd}.axis{stroke:#444}.line{stroke-width:1.5}.hit{fill:none}"


def sweep(experiment: str, arguments: Sequence[str]) -> Path:
    """The folder that is given, or a new sweep of the experiment with the overrides that are given."""
    if len(arguments) == 1 and Path(arguments[0]).is_dir():
        return Path(arguments[0])
    folder = Path(f"runs/{experiment}/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    command = [sys.executable, "-m", "specresearch", "-m", f"experiment={experiment}", f"hydra.sweep.dir={folder}"]
    status = subprocess.run([*command, *arguments]).returncode
    if status not in (cli.OK, cli.VIOLATION):
        sys.exit(status)
    return folder


def main(experiment: str, show: Callable[[list[Results]], str], arguments: Sequence[str]) -> None:
    folder = sweep(experiment, arguments)
    try:
        runs = find([folder])
    except Exception as error:
        sys.exit(cli.report(error))
    print(f"\n{show(runs)}\n\n{where(runs)}\n\nfrom {folder}")


def drafter(run: Results) -> str:
    return run.summary["config"]["drafter"]["_target_"].split(".")[-2]


def tree(run: Results) -> str:
    own = run.summary["config"]["tree"]
    return ", ".join(f"{key} {own[key]}" for key in ("depth", "topk", "size") if key in own)


def where(runs: Sequence[Results]) -> str:
    """Under a table: how much was decoded, whether losslessly, and where."""
    first = runs[0].summary
    source, verdicts = first["provenance"], sorted({run.summary["lossless"]["verdict"] for run in runs})
    device, versions = source["device"], source["versions"]
    return (
        f"- {len(runs)} runs of {first['prompts']} answers; losslessness: {', '.join(verdicts)}\n"
        f"- {source['time'][:10]}, {device['name']}, {device['threads']} threads, {device['dtype']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}"
    )


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def draw(path: Path, series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> None:
    """Lines through points, one for each name, as an SVG file for a paper or a page."""
    points = [point for own in series.values() for point in own]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    room = (max(ys) - min(ys)) * 0.08 or 0.1
    axes = Axes(x=(min(xs), max(xs)), y=(min(ys) - room, max(ys) + room), right=72)
    parts = [tag("style", STYLE), frame(axes, x_label, y_label, x_ticks=sorted(set(xs)))]
    for number, (name, own) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        marks = [dot(axes.px(x), axes.py(y), f"{name}: {x:g}, {y:.3f}", "", number) for x, y in own]
        parts.append(tag("g", line(axes, own, ""), stroke=colour, fill="none"))
        parts.append(tag("g", *marks, fill=colour))
        parts.append(text(WIDTH - 66, axes.py(own[-1][1]) + 4, name))
    path.write_text(str(chart(axes.height, f"{y_label} by {x_label}", *parts)), encoding="utf-8")
