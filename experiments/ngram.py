"""Prompt lookup by kind of prompt: makes the run of conf/experiment/ngram.yaml, or reads one, and prints its table.

    python experiments/ngram.py [RUN_DIR | overrides ...]

Speeds are ratios within one run, its modes interleaved prompt by prompt; `experiments/ngram.md` holds a recorded result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def make(overrides: list[str]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ngram-"))
    command = [sys.executable, "-m", "specresearch", "experiment=ngram", f"hydra.run.dir={folder}", *overrides]
    subprocess.run(command, check=True)
    return folder


def table(summary: dict[str, Any]) -> str:
    """Markdown: one row a kind, the pooled one last."""
    rows = ["| kind | answers | tokens | accepted length | speed / plain |", "|---|---|---|---|---|"]
    pooled = {"pooled": summary}
    for kind, own in (summary["by_kind"] | pooled).items():
        gain = f"{own['speedup']:.2f}" if own["speedup"] else "-"
        rows.append(f"| {kind} | {own['prompts']} | {own['tokens']} | {own['mean_accepted_length']:.2f} | {gain} |")
    return "\n".join(rows)


def facts(summary: dict[str, Any]) -> str:
    time, where = summary["time"], summary["provenance"]
    loop = (time["other"] + time["verify"] + time["commit"]) / sum(time.values())
    device, versions = where["device"], where["versions"]
    return "\n".join(
        (
            f"- losslessness: {summary['lossless']['verdict']}",
            f"- plain decoding / transformers' generate: {plain_over_hf(summary)}",
            f"- verify + commit + other: {loop:.1%} of the decoding time; drafting {time['draft'] / sum(time.values()):.1%}",
            f"- {where['time'][:10]}, {device['name']}, {device['threads']} threads, {device['dtype']}, "
            f"torch {versions['torch']}, transformers {versions['transformers']}",
        )
    )


def plain_over_hf(summary: dict[str, Any]) -> str:
    hf = summary.get("hf_tokens_per_second")
    return f"{summary['baseline_tokens_per_second'] / hf:.2f}" if hf else "-"


def main(arguments: list[str]) -> None:
    given = [a for a in arguments if Path(a).is_dir()]
    folder = Path(given[0]) if given else make(arguments)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    print(f"\n{table(summary)}\n\n{facts(summary)}")


if __name__ == "__main__":
    main(sys.argv[1:])
