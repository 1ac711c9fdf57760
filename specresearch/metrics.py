"""From the trace and the block times to summary.json. Pure functions, so that a resumed run ends with the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

# The numbers of summary.json that a sweeper may maximise (`objective=`).
NUMBERS = (
    "mean_accepted_length",
    "acceptance_rate",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "predicted_speedup",
    "hf_tokens_per_second",
    "hf_speedup",
    "peak_memory_bytes",
    "prompts",
    "tokens",
    "steps",
    "target_passes",
)

Line = dict[str, Any]  # a line of trace.jsonl
Block = dict[str, Any]  # a line of blocks.jsonl


def ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def acceptance(lines: Sequence[Line]) -> dict[str, Any]:
    """Counting rules: a step's accepted drafts are its emitted tokens minus one; the prefill's token is in no step."""
    histogram: Counter[int] = Counter()
    drafted = 0
    deep: Counter[int] = Counter()  # steps with a tree at least j deep and at least j - 1 accepted
    for step in (step for line in lines for step in line["steps"]):
        histogram[step["emitted"]] += 1
        drafted += sum(token >= 0 for token in step["tokens"][1:])
        for j in range(1, min(tree_depth(step), step["emitted"]) + 1):
            deep[j] += 1
    steps = sum(histogram.values())
    accepted = sum((k - 1) * n for k, n in histogram.items())
    reached = {j: sum(n for k, n in histogram.items() if k > j) for j in deep}
    return {
        "mean_accepted_length": ratio(sum(k * n for k, n in histogram.items()), steps),
        "accepted_length_histogram": {str(k): histogram[k] for k in sorted(histogram)},
        "acceptance_rate": ratio(accepted, drafted),
        "acceptance_rate_by_depth": [reached[j] / steps for j in sorted(deep)],
        "conditional_acceptance_rate_by_depth": [reached[j] / deep[j] for j in sorted(deep)],
        "prompts": len(lines),
        "tokens": sum(len(line["output_ids"]) for line in lines),
        "steps": steps,
    }


def from_drafts(lines: Iterable[Line]) -> int:
    """Tokens that the acceptance rule made: those of steps in which something was drafted."""
    steps = (step for line in lines for step in line["steps"])
    return sum(step["emitted"] for step in steps if any(token >= 0 for token in step["tokens"][1:]))


def tree_depth(step: Line) -> int:
    depth = [0] * len(step["parent"])
    for node, parent in enumerate(step["parent"]):
        if node and step["tokens"][node] >= 0:
            depth[node] = depth[parent] + 1
    return max(depth)


def rate(blocks: Iterable[Block], mode: str) -> float | None:
    """Tokens per second of one mode, prefill included, warm-up excluded."""
    done = [block[mode] for block in blocks if mode in block]
    return ratio(sum(d["tokens"] for d in done), sum(d["seconds"] for d in done))


def joint_rate(blocks: Sequence[Block]) -> float | None:
    """Speculative tokens per second of several ranks that answered side by side: the sum of their rates."""
    ranks = {block.get("rank", 0) for block in blocks}
    return sum(rate([b for b in blocks if b.get("rank", 0) == r], "speculative") or 0.0 for r in ranks) or None


def timed(block: Block) -> bool:
    """Whether plain decoding took its turn in this block."""
    return "speculative" in block and "baseline" in block


def gain(blocks: Iterable[Block], mode: str) -> float | None:
    """Speculative tokens per second against those of `mode`, on the blocks that were decoded both ways."""
    both = [block for block in blocks if mode in block]
    spec, other = rate(both, "speculative"), rate(both, mode)
    return spec / other if spec and other else None


def speed(blocks: Sequence[Block]) -> dict[str, Any]:
    """`baseline_prompts` = answers that were timed both ways: all of a lone run, some of a sweep's job."""
    out = {
        "target_passes": sum(block["speculative"]["target_passes"] for block in blocks),
        "tokens_per_second": rate(blocks, "speculative"),
        "baseline_tokens_per_second": rate(blocks, "baseline"),
        "speedup": gain(blocks, "baseline"),
        "baseline_prompts": sum(block["answers"] for block in blocks if "baseline" in block),
    }
    if any("hf" in block for block in blocks):
        out |= {"hf_tokens_per_second": rate(blocks, "hf"), "hf_speedup": gain(blocks, "hf")}
    return out


def time_by_part(blocks: Sequence[Block]) -> dict[str, float]:
    """Seconds by part of the speculative decoding; `other` is what the parts leave of the wall time."""
    parts: Counter[str] = Counter()
    for block in blocks:
        parts.update({k: v for k, v in block["speculative"]["time"].items() if k != "other"})
    wall = sum(block["speculative"]["seconds"] for block in blocks)
    named = {part: parts[part] for part in ("prefill", "draft", "target", "verify", "commit")}
    return named | {"other": max(wall - sum(named.values()), 0.0)}


def by_kind(lines: Sequence[Line], blocks: Sequence[Block]) -> dict[str, Any]:
    """`speedup` only where blocks hold one kind alone (batch_size=1): a mixed block's time cannot be told apart."""
    kinds = dict.fromkeys(line["kind"] for line in lines)
    out = {}
    for kind in kinds:
        own = acceptance([line for line in lines if line["kind"] == kind])
        pure = speed([block for block in blocks if block["kinds"] == [kind]])
        out[kind] = {key: own[key] for key in ("prompts", "tokens", "steps", "mean_accepted_length")}
        out[kind]["speedup"] = pure["speedup"]
    return out


def summarise(lines: Sequence[Line], blocks: Sequence[Block]) -> dict[str, Any]:
    return acceptance(lines) | speed(blocks) | {"time": time_by_part(blocks), "by_kind": by_kind(lines, blocks)}
