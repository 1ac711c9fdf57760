"""What a run shows: the bar while it works, the streamed text, the table at the end, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

out = Console(soft_wrap=True, highlight=False)
VERDICT_STYLE = {
    "lossless": "bold green",
    "consistent": "bold green",
    "near_tie": "bold yellow",
    "violation": "bold red",
}


def fail(message: str) -> int:
    """Print an error for people: one line -> the exit status."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 1


def wide() -> Console:
    """For tables that need room: as wide as the terminal, or as a long line where the output is no terminal."""
    return out if out.is_terminal else Console(width=128, highlight=False)


def note(message: str) -> None:
    print(message, file=sys.stderr)


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=out.quiet,
    )


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def show(summary: dict[str, Any], folder: Path, where: str | None) -> None:
    """The table of a finished (or interrupted) run."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in rows(summary):
        table.add_row(Text(label, style="bold"), value)
    out.print(table)
    kinds(summary)
    out.print(f"[bold]written to[/]  {folder}/  summary.json, trace.jsonl")
    if where:
        out.print(where, markup=False)


def rows(s: dict[str, Any]) -> list[tuple[str, Text]]:
    speed = f"{number(s['tokens_per_second'], 1)} tokens/s"
    if s["baseline_tokens_per_second"]:
        speed += f"   plain {number(s['baseline_tokens_per_second'], 1)}   speedup {number(s['speedup'])}x"
    if s.get("hf_tokens_per_second"):
        speed += f"   transformers {number(s['hf_tokens_per_second'], 1)}   {number(s['hf_speedup'])}x"
    depth = "  ".join(f"{j}: {rate:.2f}" for j, rate in enumerate(s["acceptance_rate_by_depth"], 1))
    total = sum(s["time"].values())
    time = "  ".join(f"{k} {v / total:.0%}" for k, v in s["time"].items()) if total else "-"
    counts = f"{s['prompts']} answers, {s['tokens']} tokens, {s['steps']} steps, {s['target_passes']} target passes"
    return [
        ("accepted length", Text(f"{number(s['mean_accepted_length'])} tokens per target pass, bonus included")),
        ("its histogram", Text(bars(s["accepted_length_histogram"]))),
        ("acceptance rate", Text(f"{number(s['acceptance_rate'])} of drafted tokens   by depth  {depth or '-'}")),
        ("speed", Text(speed)),
        ("time", Text(time)),
        ("counted", Text(counts)),
        ("losslessness", losslessness(s["lossless"])),
    ]


def bars(histogram: Mapping[str, float]) -> str:
    total = sum(histogram.values())
    lines = [f"{k:>3}  {'█' * round(40 * n / total):<40} {n / total:6.1%}" for k, n in histogram.items()]
    return "\n".join(lines) or "-"


def losslessness(found: dict[str, Any]) -> Text:
    verdict = found["verdict"]
    text = Text(verdict.upper() if verdict in ("lossy", "violation", "simulated") else verdict)
    text.stylize(VERDICT_STYLE.get(verdict, "bold"))
    if "equal" in found:
        text.append(f"   {found['equal']} of {found['answers']} answers equal {found['reference']} token by token")
        for entry in (found["violations"] + found["near_ties"])[:5]:
            gap = f", gap {entry['one_token_gap']:.2g} (noise {entry['gap_noise']:.2g})" if "gap_noise" in entry else ""
            text.append(f"\n{entry['verdict']} in question {entry['id']}, token {entry['position']}{gap}")
    else:
        text.append(f"   {found['reason']}")
    for claim in found.get("white_box", ()):
        how = claim["verdict"] if claim["kind"] == "tested" else claim["kind"]
        text.append(f"\nwhite box: {claim['claim']}: {how} (n = {claim['n']})")
    return text


def kinds(summary: dict[str, Any]) -> None:
    if len(summary["by_kind"]) < 2:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("kind", "answers", "tokens", "accepted length", "speedup"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, own in summary["by_kind"].items():
        length, gain = number(own["mean_accepted_length"]), number(own["speedup"], 2, "x")
        table.add_row(kind, str(own["prompts"]), str(own["tokens"]), length, gain if own["speedup"] else "-")
    out.print(table)
