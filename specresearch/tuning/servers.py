"""The settings of SGLang and vLLM that are nearest to a drafter and a tree chosen here, and where they are not the same."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

HEAD = "OUT"  # where the exported head is


def sglang(drafter: str, keys: Mapping[str, Any], tree: Mapping[str, int], version: int = 3) -> str:
    """`keys` = the drafter's configuration; `version` of an EAGLE head. Nodes are counted with the root, as here."""
    shape = {"num-steps": tree["depth"], "eagle-topk": tree["topk"], "num-draft-tokens": tree["size"]}
    if drafter == "eagle":
        options = {"algorithm": "EAGLE3" if version == 3 else "EAGLE", "draft-model-path": f"{HEAD}/sglang", **shape}
    elif drafter == "small_lm":
        options = {"algorithm": "STANDALONE", "draft-model-path": keys.get("id") or "A_DRAFT_MODEL", **shape}
    elif drafter == "ngram":
        options = {"algorithm": "NGRAM", "num-draft-tokens": tree["size"], "ngram-max-bfs-breadth": tree["topk"]}
    else:
        return f"none: SGLang has no {drafter}"
    words = (str(word) for key, value in options.items() for word in (f"--speculative-{key}", value))
    note = "   (another look-up: a trie of all texts, and always padded to that size)" if drafter == "ngram" else ""
    return shlex.join(words) + note


def vllm(drafter: str, keys: Mapping[str, Any], chain: int, version: int = 3) -> str:
    """vLLM drafts chains only: `chain` = the best length of one."""
    settings: dict[str, Any]
    if drafter == "eagle":
        settings = {"method": "eagle3" if version == 3 else "eagle", "model": f"{HEAD}/vllm"}
    elif drafter == "medusa":
        settings = {"method": "medusa", "model": f"{HEAD}/vllm"}
    elif drafter == "small_lm":
        settings = {"method": "draft_model", "model": keys.get("id") or "A_DRAFT_MODEL"}
    elif drafter == "ngram":
        settings = {"method": "ngram", "prompt_lookup_min": keys["min_n"], "prompt_lookup_max": keys["max_n"]}
    else:
        return f"none: vLLM has no {drafter}"
    return "--speculative-config " + shlex.quote(json.dumps(settings | {"num_speculative_tokens": chain}))


def export(drafter: str, keys: Mapping[str, Any], tree: Mapping[str, int]) -> str | None:
    """The command that writes the head for both, if it is one of ours."""
    if drafter not in ("eagle", "medusa"):
        return None
    ckpt = keys.get("ckpt", "auto")
    if ckpt == "auto" and drafter == "medusa":
        ckpt = "DIR"
    shape = " ".join(f"tree.{key}={value}" for key, value in tree.items())
    return f"python -m specresearch.export ckpt={shlex.quote(str(ckpt))} out={HEAD} {shape}"
