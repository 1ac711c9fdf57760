"""What a run shows: the bar while it works, the streamed text, the table at the end, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from specresearch.spec_bench import WHY, differ
from specresearch.sweeps import SweepJob, best, varied

out = Console(soft_wrap=True, highlight=False)
VERDICT_STYLE = {
    "lossless": "bold green",
    "consistent": "bold green",
    "near_tie": "bold yellow",
    "simulated": "bold yellow",
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
    groups(summary["spec_bench"]) if "spec_bench" in summary else kinds(summary)
    report = ", report.html" if (folder / "report.html").exists() else ""
    out.print(f"[bold]written to[/]  {folder}/  summary.json, trace.jsonl{report}")
    if where:
        out.print(where, markup=False)


def rows(s: dict[str, Any]) -> list[tuple[str, Text]]:
    speed = f"{number(s['tokens_per_second'], 1)} tokens/s"
    if s["baseline_tokens_per_second"]:
        some = f" on {s['baseline_prompts']} answers" if s.get("baseline_prompts", s["prompts"]) < s["prompts"] else ""
        speed += f"   plain {number(s['baseline_tokens_per_second'], 1)}{some}   speedup {number(s['speedup'])}x"
    if s.get("hf_tokens_per_second"):
        speed += f"   transformers {number(s['hf_tokens_per_second'], 1)}   {number(s['hf_speedup'])}x"
    if joint := s.get("data_parallel"):
        speed += f"\n{joint['ranks']} processes together {number(joint['tokens_per_second'], 1)} tokens/s"
    if s.get("predicted_speedup"):
        speed += f"\npredicted {number(s['predicted_speedup'])}x from measured costs"
    depth = "  ".join(f"{j}: {rate:.2f}" for j, rate in enumerate(s["acceptance_rate_by_depth"], 1))
    total = sum(s["time"].values())
    time = "  ".join(f"{k} {v / total:.0%}" for k, v in s["time"].items()) if total else "-"
    counts = f"{s['prompts']} answers, {s['tokens']} tokens, {s['steps']} steps, {s['target_passes']} target passes"
    loud = [("SIMULATED", Text(s["simulated"], style=VERDICT_STYLE["simulated"]))] if s.get("simulated") else []
    grammar = [("grammar", Text(constrained(s["grammar"], total)))] if "grammar" in s else []
    return [
        *loud,
        ("accepted length", Text(f"{number(s['mean_accepted_length'])} tokens per target pass, bonus included")),
        ("its histogram", Text(bars(s["accepted_length_histogram"]))),
        ("acceptance rate", Text(f"{number(s['acceptance_rate'])} of drafted tokens   by depth  {depth or '-'}")),
        ("speed", Text(speed)),
        ("time", Text(time)),
        ("counted", Text(counts)),
        *grammar,
        ("losslessness", losslessness(s["lossless"])),
    ]


def constrained(found: dict[str, Any], total: float) -> str:
    """`total` seconds of speculative decoding."""
    answers = found["complete"] + found["cut"] + found["off"]
    rest = f", {found['cut']} cut short" * bool(found["cut"]) + f", {found['off']} OFF THE GRAMMAR" * bool(found["off"])
    share = f"   masks {found['mask_seconds'] / total:.1%} of the time" if total else ""
    return f"{found['kind']}: {found['complete']} of {answers} answers complete{rest}{share}"


def bars(histogram: Mapping[str, float]) -> str:
    total = sum(histogram.values())
    lines = [f"{k:>3}  {'█' * round(40 * n / total):<40} {n / total:6.1%}" for k, n in histogram.items()]
    return "\n".join(lines) or "-"


def losslessness(found: dict[str, Any]) -> Text:
    text = verdict_text(found["verdict"])
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


def verdict_text(verdict: str) -> Text:
    loud = verdict.upper() if verdict in ("lossy", "violation", "simulated") else verdict
    return Text(loud, style=VERDICT_STYLE.get(verdict, "bold"))


def show_sweep(folder: Path, found: Sequence[SweepJob]) -> None:
    """One row a job that is done, what failed and why, and the best one where there is an objective."""
    keys, table = varied(found), Table(box=None, padding=(0, 2, 0, 0))
    for key in ("job", *keys):
        table.add_column(Text(key), overflow="fold")
    for heading in ("accepted length", "tokens/s", "speedup"):
        table.add_column(heading, justify="right")
    table.add_column("losslessness")
    for job in found:
        if s := job.summary:
            own = [Text(job.overrides.get(key, "-")) for key in keys]
            speeds = number(s["tokens_per_second"], 1), number(s["speedup"], 2, "x" if s["speedup"] else "")
            table.add_row(job.folder.name, *own, number(s["mean_accepted_length"]), *speeds, verdict_text(job.verdict))
    done = sum(job.state == "done" for job in found)
    wide().print(f"\n[bold]{done} of {len(found)} jobs done[/]  in {folder}/  sweep.json")
    if done:
        wide().print(table)
    if top := best(found):
        out.print(f"[bold]best {top[1]}[/]  {number((top[0].summary or {})[top[1]])}  {top[0].command()}")
    for job in found:
        if job.state != "done":
            given = " ".join(f"{key}={job.overrides[key]}" for key in keys if key in job.overrides)
            note(f"{job.state}: job {job.folder.name} {given}: {job.reason}")


def kinds(summary: dict[str, Any]) -> None:
    if len(summary["by_kind"]) < 2:
        return
    table = columns("kind", "answers", "tokens", "accepted length", "speedup")
    for kind, own in summary["by_kind"].items():
        length, gain = number(own["mean_accepted_length"]), number(own["speedup"], 2, "x")
        table.add_row(kind, str(own["prompts"]), str(own["tokens"]), length, gain if own["speedup"] else "-")
    out.print(table)


def groups(found: dict[str, Any]) -> None:
    """Spec-Bench's groups, with its own way of computing the speedup where that makes a difference."""
    theirs = differ(found)
    table = columns(*("group", "questions", "answers", "accepted length", "speedup"), *["Spec-Bench's"] * theirs)
    for group, own in (*found["groups"].items(), ("overall", found["overall"])):
        gains = [own["speedup"], *[own["as_spec_bench"]["speedup"]] * theirs]
        cells = [str(own["questions"]), str(own["prompts"]), number(own["mean_accepted_length"])]
        table.add_row(group, *cells, *("-" if gain is None else number(gain, 2, "x") for gain in gains))
    out.print(table)
    if theirs:
        out.print(WHY.format(**found["recounted"]), style="dim")


def columns(first: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
