"""A run, or several side by side, as one HTML file that needs neither network nor model: pure functions of the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from specresearch.console import number
from specresearch.report import figures, timing, verdict
from specresearch.report.figures import Figure, Table
from specresearch.report.subject import Subject, command, flat, option, subjects
from specresearch.report.timeline import timeline
from specresearch.results import Results, read
from specresearch.types import UserError

PARTS = ("target", "drafter", "tree", "verifier", "prompts")
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def run_report(results: Results) -> str:
    """The page of one run."""
    (run,) = subjects([results])
    config = run.summary.get("config") or {}
    return _page(
        "run.html",
        title=" · ".join(option(part, config.get(part)) for part in ("drafter", "tree", "target")),
        facts=_facts(run),
        headline=_headline(run.summary),
        verdict=verdict.of(run),
        acceptance=[make([run]) for make in (figures.accepted_length, figures.by_depth, figures.by_rank)],
        tree=figures.tree(run) if run.tally.drafted else None,
        timeline=timeline(results),
        time=[timing.parts([run]), timing.steps_over_time([run])],
        speed=_kept(timing.yields(run), timing.pass_costs([run])),
        speeds=_speeds(run.summary),
        kinds=figures.kinds([run]),
        evidence=timing.evidence([run]),
        disputes=verdict.disputes(run),
        tables=verdict.tables(run),
        command=command(results),
        rebuild=f"python -m specresearch.report {results.folder}",
        provenance=_provenance(run.summary),
        config=sorted(flat(config).items()),
        raw=json.dumps(config, indent=2, ensure_ascii=False),
        interrupted=bool(run.summary.get("interrupted")),
    )


def comparison_report(results: Sequence[Results]) -> str:
    """The page of several runs; one line's colour and mark are its run's in every figure."""
    runs = subjects(results)
    made = (figures.accepted_length, figures.by_depth, figures.by_rank)
    return _page(
        "comparison.html",
        title=f"{len(runs)} runs compared",
        runs=runs,
        verdicts=[(run, verdict.of(run)) for run in runs],
        entries=_run_table(runs),
        warnings=_warnings(runs),
        scatter=timing.speed_and_length(runs),
        acceptance=[make(runs) for make in made],
        time=_kept(timing.parts(runs), timing.steps_over_time(runs), timing.pass_costs(runs)),
        kinds=figures.kinds(runs),
        evidence=timing.evidence(runs),
        trees=[(run, figures.tree(run)) for run in runs[:6] if run.tally.drafted],
        differences=_differences(runs),
        commands=[(run, command(run.results)) for run in runs],
        rebuild="python -m specresearch.report " + " ".join(str(run.results.folder) for run in runs),
    )


def write(folder: Path) -> Path:
    """Write report.html into a finished run's folder, from what lies there."""
    path = folder / "report.html"
    path.write_text(run_report(read(folder)), encoding="utf-8")
    return path


def _page(template: str, **content: Any) -> str:
    environment = Environment(
        loader=PackageLoader("specresearch.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source = environment.loader
    assert source is not None
    style, script = (source.get_source(environment, name)[0] for name in ("style.css", "script.js"))
    return environment.get_template(template).render(style=style, script=script, **content)


def _kept(*made: Figure | None) -> list[Figure]:
    return [figure for figure in made if figure is not None]


def _facts(run: Subject) -> list[tuple[str, str]]:
    config, origin = run.summary.get("config") or {}, run.summary.get("provenance") or {}
    device = origin.get("device") or {}
    named = [(part, option(part, config.get(part))) for part in PARTS]
    tree = ", ".join(f"{k} {v}" for k, v in (config.get("tree") or {}).items() if k in ("depth", "topk", "size"))
    named = [(part, f"{name} ({tree})" if part == "tree" and tree else name) for part, name in named]
    sampling = [f"{key} {config[key]}" for key in SAMPLING[1:] if config.get(key) not in (None, 0, 1)]
    return [
        *named,
        ("temperature", ", ".join([str(config.get("temperature", "-")), *sampling])),
        ("batch size", str(config.get("batch_size", "-"))),
        ("device", ", ".join(str(device[key]) for key in ("name", "dtype") if key in device) or "-"),
        ("date", str(origin.get("time", "-")).replace("T", " ").replace("+00:00", " UTC")),
        ("counted", "{prompts:,} answers, {tokens:,} tokens, {steps:,} steps".format(**run.summary)),
    ]


def _headline(s: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(number, what it is, what it stands beside)"""
    plain = s["baseline_tokens_per_second"]
    return [
        (number(s["mean_accepted_length"]), "accepted length", "tokens per target pass, bonus included"),
        (number(s["speedup"], 2, "×"), "speedup", "against our own plain decoding" if plain else "no baseline was run"),
        (number(s["tokens_per_second"], 1), "tokens/s", f"plain {number(plain, 1)}"),
        (number(s["acceptance_rate"]), "acceptance rate", "accepted / drafted, bonus excluded"),
    ]


def _speeds(s: dict[str, Any]) -> Table:
    rows = [("measured", number(s["speedup"], 3, "×"), "tokens/s over plain decoding's, prompts included")]
    if s.get("predicted_speedup") is not None:
        rows.append(("predicted", number(s["predicted_speedup"], 3, "×"), "accepted length over measured costs of the passes"))
        if s["speedup"]:
            gap = s["speedup"] / s["predicted_speedup"] - 1
            rows.append(("gap", f"{gap:+.1%}", "measured against predicted"))
    if s.get("hf_speedup"):
        rows.append(("over transformers", number(s["hf_speedup"], 3, "×"), "tokens/s over transformers' generate"))
    return Table("Speedup, measured and predicted", ("", "speedup", "what it is"), rows)


def _provenance(s: dict[str, Any]) -> list[tuple[str, str]]:
    origin = s.get("provenance") or {}
    git = origin.get("git") or {}
    sha = f"{git['sha']}{', changed since' if git.get('dirty') else ''}" if git else "an installed copy"
    device = ", ".join(f"{k} {v}" for k, v in (origin.get("device") or {}).items())
    versions = ", ".join(f"{k} {v}" for k, v in (origin.get("versions") or {}).items())
    memory = f"{s['peak_memory_bytes'] / 2**30:.2f} GiB" if s.get("peak_memory_bytes") else "-"
    keys = (("source", sha), ("versions", versions), ("device", device), ("platform", origin.get("platform", "-")))
    return [*((key, str(value)) for key, value in keys), ("peak memory", memory)]


def _run_table(runs: Sequence[Subject]) -> list[dict[str, Any]]:
    return [
        {
            "run": run,
            "answers": f"{run.summary['prompts']:,}",
            "length": number(run.summary["mean_accepted_length"]),
            "rate": number(run.summary["acceptance_rate"]),
            "speed": number(run.summary["tokens_per_second"], 1),
            "plain": number(run.summary["baseline_tokens_per_second"], 1),
            "gain": number(run.summary["speedup"], 2, "×"),
            "predicted": number(run.summary.get("predicted_speedup"), 2, "×"),
            "verdict": verdict.of(run),
        }
        for run in runs
    ]


def _warnings(runs: Sequence[Subject]) -> list[str]:
    """What makes the numbers hard to compare."""
    found = []
    asked = {tuple((line["id"], line["turn"]) for line in run.lines if line["turn"] == 0) for run in runs}
    if len(asked) > 1:
        found.append("The runs did not answer the same questions.")
    machines = {json.dumps((run.summary.get("provenance") or {}).get("device"), sort_keys=True) for run in runs}
    if len(machines) > 1:
        found.append("The runs were made on different devices or in different dtypes: compare speedups, not tokens/s.")
    cut = [run.name for run in runs if run.summary.get("interrupted")]
    if cut:
        found.append(f"Interrupted, so not all questions were answered: {'; '.join(cut)}.")
    return found


def _differences(runs: Sequence[Subject]) -> Table:
    configs = [flat(run.summary.get("config") or {}) for run in runs]
    keys = sorted({key for config in configs for key in config})
    varying = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    rows = [(key, *(config.get(key, "") for config in configs)) for key in varying]
    return Table("Keys of the configuration that differ", ("key", *(run.name for run in runs)), rows)


def of_folders(found: Sequence[Results]) -> str:
    """One run: its report; several: the comparison. Raises UserError for none."""
    if not found:
        raise UserError("no run is given: python -m specresearch.report RUN_DIR... | SWEEP_DIR [out=FILE]")
    return run_report(found[0]) if len(found) == 1 else comparison_report(found)
