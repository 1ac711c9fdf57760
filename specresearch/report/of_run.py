"""The page of one run."""

from __future__ import annotations

import json
import shlex
from typing import Any

from specresearch.console import number
from specresearch.report import evidence, figures, speed, timing, verdict
from specresearch.report.figures import Table
from specresearch.report.render import page
from specresearch.report.subject import Subject, command, option, subjects, within
from specresearch.report.timeline import timeline
from specresearch.report.tree import tree
from specresearch.results import Results

PARTS = ("target", "drafter", "tree", "verifier", "prompts")
SAMPLING = ("top_p", "top_k", "min_p")


def run_report(results: Results) -> str:
    """The page of one run."""
    (run,) = subjects([results])
    config = run.summary.get("config") or {}
    return page(
        "run.html",
        title=" · ".join(option(part, config.get(part)) for part in ("drafter", "tree", "target")),
        facts=_facts(run),
        headline=_headline(run),
        verdict=verdict.of(run),
        acceptance=[make([run]) for make in (figures.accepted_length, figures.by_depth, figures.by_rank)],
        tree=tree(run) if run.tally.drafted else None,
        timeline=timeline(results),
        time=[timing.parts([run]), timing.steps_over_time([run])],
        speed=[it for it in (speed.yields(run), speed.pass_costs([run])) if it],
        speeds=_speeds(run),
        kinds=figures.kinds([run]),
        evidence=evidence.evidence([run]),
        disputes=verdict.disputes(run),
        tables=verdict.tables(run),
        command=command(results),
        rebuild=shlex.join(["python", "-m", "specresearch.report", str(results.folder)]),
        provenance=_provenance(run.summary),
        raw=json.dumps(config, indent=2, ensure_ascii=False),
        interrupted=bool(run.summary.get("interrupted")),
    )


def _facts(run: Subject) -> list[tuple[str, str]]:
    config, origin = run.summary.get("config") or {}, run.summary.get("provenance") or {}
    device = origin.get("device") or {}
    named = [(part, option(part, config.get(part))) for part in PARTS]
    tree = ", ".join(f"{k} {v}" for k, v in (config.get("tree") or {}).items() if k in ("depth", "topk", "size"))
    named = [(part, f"{name} ({tree})" if part == "tree" and tree else name) for part, name in named]
    sampling = [f"{key} {config[key]}" for key in SAMPLING if config.get(key) not in (None, 0, 1)]
    return [
        *named,
        ("temperature", ", ".join([str(config.get("temperature", "-")), *sampling])),
        ("batch size", str(config.get("batch_size", "-"))),
        ("device", ", ".join(str(device[key]) for key in ("name", "dtype") if key in device) or "-"),
        ("date", str(origin.get("time", "-")).replace("T", " ").replace("+00:00", " UTC")),
        ("counted", "{prompts:,} answers, {tokens:,} tokens, {steps:,} steps".format(**run.summary)),
    ]


def _headline(run: Subject) -> list[tuple[str, str, str]]:
    """(number, what it is, what it stands beside)"""
    s = run.summary
    plain = s["baseline_tokens_per_second"]
    against = f"against our own plain decoding{within(run.gain, ', 95%: ')}" if plain else "no baseline was run"
    return [
        (number(s["mean_accepted_length"]), "accepted length", "tokens per target pass, bonus included"),
        (number(s["speedup"], 2, "×"), "speedup", against),
        (number(s["tokens_per_second"], 1), "tokens/s", f"plain {number(plain, 1)}"),
        (number(s["acceptance_rate"]), "acceptance rate", "accepted / drafted, bonus excluded"),
    ]


def _speeds(run: Subject) -> Table:
    s, sure = run.summary, within(run.gain, "; 95% interval ")
    rows = [("measured", number(s["speedup"], 3, "×"), f"tokens/s over plain decoding's, prompts included{sure}")]
    if s.get("predicted_speedup") is not None:
        rows.append(
            ("predicted", number(s["predicted_speedup"], 3, "×"), "accepted length over measured costs of the passes")
        )
        if s["speedup"]:
            gap = s["speedup"] / s["predicted_speedup"] - 1
            rows.append(("gap", f"{gap:+.1%}", "measured against predicted"))
    if s.get("hf_speedup"):
        rows.append(("over transformers", number(s["hf_speedup"], 3, "×"), "tokens/s over transformers' generate"))
    return Table("Speedup, measured and predicted", ("", "speedup", "what it is"), rows, (2,))


def _provenance(s: dict[str, Any]) -> list[tuple[str, str]]:
    origin = s.get("provenance") or {}
    git = origin.get("git") or {}
    sha = f"{git['sha']}{', changed since' if git.get('dirty') else ''}" if git else "an installed copy"
    device = ", ".join(f"{k} {v}" for k, v in (origin.get("device") or {}).items())
    versions = ", ".join(f"{k} {v}" for k, v in (origin.get("versions") or {}).items())
    memory = f"{s['peak_memory_bytes'] / 2**30:.2f} GiB" if s.get("peak_memory_bytes") else "-"
    keys = (("source", sha), ("versions", versions), ("device", device), ("platform", origin.get("platform", "-")))
    return [*((key, str(value)) for key, value in keys), ("peak memory", memory)]
