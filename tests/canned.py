"""Folders of runs, written by hand: what a run leaves behind, without a model."""

import json
from pathlib import Path

CONFIG = {
    **{"seed": 0, "limit": None, "max_new_tokens": 64, "batch_size": 1, "stop": [], "temperature": 0, "top_p": 1},
    **{
        "top_k": 0,
        "min_p": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "baseline": True,
        "check": True,
        "resume": None,
    },
    "drafter": {"_target_": "specresearch.drafters.ngram.NGram", "max_n": 4},
    "tree": {"_target_": "specresearch.trees.dynamic.DynamicTree", "depth": 4, "topk": 4, "size": 8},
    "verifier": {"_target_": "specresearch.verifiers.rejection.Rejection"},
    "target": {"_target_": "specresearch.models.tiny.load", "dtype": None, "device": "auto", "seed": 0},
    "prompts": {"_target_": "specresearch.prompts.builtin"},
    "kernels": {"_target_": "specresearch.kernels.backend.use", "name": "auto"},
    "tracker": {"_target_": "specresearch.tracking.NoTracker"},
}
PROVENANCE = {
    "git": {"sha": "a" * 40, "dirty": False},
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "device": {"kind": "cpu", "name": "a processor", "threads": 2, "dtype": "torch.float32"},
}


def step(emitted: int, depth: int = 4) -> dict:
    """A chain of `depth` drafts, of which `emitted` - 1 were accepted."""
    parent = [-1, *range(depth)]
    return {"emitted": emitted, "tokens": [7] * (depth + 1), "parent": parent, "path": parent[1 : emitted + 1] or [0]}


def line(id: int | str, lengths: list[int], turn: int = 0, kind: str = "qa", depth: int = 4) -> dict:
    """An answer whose steps emitted `lengths`; its first token comes from the prompt."""
    ids = [7] * (1 + sum(lengths))
    about = {
        "id": id,
        "kind": kind,
        "turn": turn,
        "prompt_ids": [1, 2, *str(id).encode()],
        "text": "",
        "finish": "length",
    }
    return about | {"output_ids": ids, "steps": [step(n, depth) for n in lengths]}


def mode(lines: list[dict], seconds: float, passes: int, target: float = 0.0) -> dict:
    tokens = sum(len(each["output_ids"]) for each in lines)
    time = {"prefill": 0.0, "draft": 0.0, "target": target, "verify": 0.0, "commit": 0.0, "other": seconds - target}
    return {"tokens": tokens, "seconds": seconds, "target_passes": passes, "time": time, "skipped": []}


def block(index: int, lines: list[dict], seconds: float, plain: float | None) -> dict:
    """`plain` = seconds of plain decoding; None: it was not timed."""
    steps = sum(len(each["steps"]) for each in lines)
    made = {"block": index, "origin": "", "kinds": ["qa"], "answers": len(lines)}
    made["speculative"] = mode(lines, seconds, steps)
    if plain is not None:
        made["baseline"] = mode(lines, plain, sum(len(each["output_ids"]) - 1 for each in lines))
    return made


def write(
    folder: Path,
    blocks: list[tuple[list[dict], float, float | None]],
    *,
    config: dict | None = None,
    provenance: dict | None = None,
    lossless: dict | None = None,
    interrupted: bool = False,
) -> Path:
    """Blocks of (answers, seconds with speculation, seconds of plain decoding) -> the folder."""
    folder.mkdir(parents=True)
    summary = {"config": CONFIG | (config or {}), "provenance": PROVENANCE | (provenance or {})}
    summary |= {"lossless": lossless or {"verdict": "lossless"}, "interrupted": interrupted, "costs": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [each for answers, *_ in blocks for each in answers]
    (folder / "trace.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    made = [block(i, *each) for i, each in enumerate(blocks)]
    (folder / "blocks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made))
    return folder
