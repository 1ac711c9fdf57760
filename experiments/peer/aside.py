"""What experiments/peers.py measures apart from the race: bytes, passes, batches, and where answers part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from peer.engines import ECONOMIZE, FLASHSPEC
from peer.machine import weight_bytes
from peer.plain_models import Models
from peer.race import Prompt

from specresearch.decode import Decoder, Job
from specresearch.provenance import provenance
from specresearch.results import read_lines

BATCH = 8


def weights(models: Models) -> dict[str, int]:
    """Bytes that a pass reads, by how they are held."""
    model = models.target.model
    return {"ours": weight_bytes(model), "float32": weight_bytes(model, 4), "bfloat16": weight_bytes(model, 2)}


def pass_times(models: Models) -> dict[str, float]:
    """Seconds of target passes, by nodes, in turns."""
    times: dict[int, list[float]] = {nodes: [] for nodes in (1, 8, 32)}
    for _ in range(3):
        for nodes in times:
            times[nodes].append(models.target.seconds(nodes))
    return {str(nodes): statistics.median(each) for nodes, each in times.items()}


def batches(
    models: Models, settings: Mapping[str, Any], prompts: Sequence[Prompt], budget: int
) -> dict[str, list[float]]:
    """Tokens per second of eight rows at a time, plainly and with EAGLE, three times in turns."""
    prompts = (list(prompts) * BATCH)[: 2 * BATCH]
    parts = {
        name: models.parts(f"drafter={drafter}", name=name) for name, drafter in (("plain", "none"), ("eagle", "eagle"))
    }
    capacity = 128 * -(-(max(len(p.ids) for p in prompts) + budget) // 128)
    rates: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(3):
        for name in [*parts][number % 2 :] + [*parts][: number % 2]:
            mine, slots = parts[name], max(parts[name].policy.asked, parts[name].policy.size)
            mine.target.reserve(BATCH, capacity, slots)
            mine.drafter.reserve(BATCH, capacity, slots)
            decoder = Decoder(mine, batch=BATCH, capacity=capacity, seed=0, decode=mine.target.text, stop=[])
            began = time.perf_counter()
            jobs = [Job(i, p.kind, 0, p.ids, budget) for i, p in enumerate(prompts)]
            tokens = sum(len(e.tokens) for e in decoder.run(iter(jobs)))
            rates[name].append(tokens / (time.perf_counter() - began))
    return rates


def differences(models: Models, folder: Path, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Where an answer first parts from plain decoding's: the largest distance of the two tokens' logits, by row."""
    answers: dict[str, dict[Any, list[int]]] = {}
    for x in read_lines(folder / "lines.jsonl"):
        if "output_ids" in x:
            answers.setdefault(x["row"], {}).setdefault(x["id"], x["output_ids"])
    apart: dict[str, float] = {}
    plain, asked = answers.get("plain", {}), {prompt.id: prompt.ids for prompt in prompts}
    for row, each in answers.items():
        for id, ids in each.items():
            if id in plain and id in asked and ids != plain[id]:
                apart[row] = max(apart.get(row, 0.0), distance(models.target, asked[id], ids, plain[id]))
    return apart


def distance(target: Any, prompt: list[int], one: list[int], other: list[int]) -> float:
    """Infinite where one answer goes on and the other ends."""
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
    if at is None:
        return float("inf")
    known = torch.tensor([prompt + one[:at]], device=target.device)
    logits = target.plain(known, torch.tensor([known.shape[1] - 1], device=target.device))[0, 0]
    return float((logits[one[at]] - logits[other[at]]).abs())


def where(models: Models) -> str:
    source = provenance(models.target)
    device, versions = source["device"], source["versions"]
    others = ", ".join(f"{name} {installed(name)}" for name in (FLASHSPEC, ECONOMIZE))
    return (
        f"{source['time'][:10]}, {device['name']}, {device['threads']} threads, {device['dtype']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, {others}"
    )


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
