"""The page of several runs, overlaid."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from specresearch.comparison.conditions import identity
from specresearch.console import number
from specresearch.report import evidence, figures, speed, timing, verdict
from specresearch.report.figures import Table
from specresearch.report.render import page
from specresearch.report.subject import Subject, command, flat, subjects, within
from specresearch.report.tree import tree
from specresearch.results import Results

TREES = 6  # that are drawn


def comparison_report(results: Sequence[Results]) -> str:
    """The page of several runs; one line's colour and mark are its run's in every figure."""
    runs = subjects(results)
    made = (figures.accepted_length, figures.by_depth, figures.by_rank)
    return page(
        "comparison.html",
        title=f"{len(runs)} runs compared",
        runs=runs,
        verdicts=[(run, verdict.of(run)) for run in runs],
        entries=_run_table(runs),
        predicted=any(run.summary.get("predicted_speedup") for run in runs),
        warnings=_warnings(runs),
        scatter=speed.speed_and_length(runs),
        acceptance=[make(runs) for make in made],
        time=[it for it in (timing.parts(runs), timing.steps_over_time(runs), speed.pass_costs(runs)) if it],
        kinds=figures.kinds(runs),
        evidence=evidence.evidence(runs),
        trees=[(run, tree(run)) for run in runs[:TREES] if run.tally.drafted],
        differences=_differences(runs),
        commands=[(run, command(run.results)) for run in runs],
        rebuild=shlex.join(["python", "-m", "specresearch.report", *(str(run.results.folder) for run in runs)]),
    )


def _run_table(runs: Sequence[Subject]) -> list[dict[str, Any]]:
    return [
        {
            "run": run,
            "answers": f"{run.summary['prompts']:,}",
            "length": number(run.summary["mean_accepted_length"]),
            "rate": number(run.summary["acceptance_rate"]),
            "speed": number(run.summary["tokens_per_second"], 1),
            "plain": number(run.summary["baseline_tokens_per_second"], 1),
            "gain": number(run.summary["speedup"], 2, "×") + within(run.gain),
            "predicted": number(run.summary.get("predicted_speedup"), 2, "×"),
            "verdict": verdict.of(run),
        }
        for run in runs
    ]


def _warnings(runs: Sequence[Subject]) -> list[str]:
    """What makes the numbers hard to compare."""
    found = []
    alike = [identity(run.results) for run in runs]
    odd = [name for name in alike[0] if any(each[name] != alike[0][name] for each in alike)]
    if odd:
        found.append(f"The runs differ in {', '.join(odd)}, so their numbers do not mean the same.")
    if len({_asked(run, "target" in odd) for run in runs}) > 1:
        found.append("The runs did not answer the same questions.")
    machines = {json.dumps((run.summary.get("provenance") or {}).get("device"), sort_keys=True) for run in runs}
    if len(machines) > 1:
        found.append("The runs were made on different devices or in different dtypes: compare speedups, not tokens/s.")
    cut = [run.name for run in runs if run.summary.get("interrupted")]
    if cut:
        found.append(f"Interrupted, so not all questions were answered: {'; '.join(cut)}.")
    return found


def _asked(run: Subject, other_tokens: bool) -> tuple[Any, ...]:
    first = [line for line in run.lines if line["turn"] == 0]
    return tuple((line["id"], None if other_tokens else tuple(line["prompt_ids"])) for line in first)


def _differences(runs: Sequence[Subject]) -> Table:
    configs = [flat(run.summary.get("config") or {}) for run in runs]
    keys = sorted({key for config in configs for key in config})
    varying = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    rows = [(key, *(config.get(key, "") for config in configs)) for key in varying]
    return Table(
        "Keys of the configuration that differ", ("key", *(run.name for run in runs)), rows, range(1, len(runs) + 1)
    )
