"""The settings of SGLang and vLLM that are nearest to a drafter and a tree chosen here, and where they are not the same."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from specresearch import commands
from specresearch.models.checkpoints import shipped
from specresearch.models.distilled import is_student

HEAD = "OUT"  # where the exported head is


def sglang(drafter: str, keys: Mapping[str, Any], tree: Mapping[str, int], version: int = 3) -> str:
    """`keys` = the drafter's configuration; `version` of an EAGLE head. Nodes are counted with the root, as here."""
    shape = {"num-steps": tree["depth"], "eagle-topk": tree["topk"], "num-draft-tokens": tree["size"]}
    if reason := unserved(drafter, keys):
        return f"none: SGLang {reason}"
    if drafter == "eagle":
        options = {"algorithm": "EAGLE3" if version == 3 else "EAGLE", "draft-model-path": f"{HEAD}/sglang", **shape}
    elif drafter == "small_lm":
        if keys.get("vocab", "same") != "same":
            return f"none: SGLang needs a draft model of the target's vocabulary, and this one's is another ({_vocab(keys)})"
        revision = {"draft-model-revision": keys["revision"]} if keys.get("revision") else {}
        options = {"algorithm": "STANDALONE", "draft-model-path": keys["id"], **revision, **shape}
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
    note = "   (chains only: the best by prediction)"
    if reason := unserved(drafter, keys):
        return f"none: vLLM {reason}"
    if drafter == "eagle":
        settings = {"method": "eagle3" if version == 3 else "eagle", "model": f"{HEAD}/vllm"}
    elif drafter == "medusa":
        settings = {"method": "medusa", "model": f"{HEAD}/vllm"}
    elif drafter == "small_lm":
        settings = {"method": "draft_model", "model": keys["id"]}
        settings |= {"revision": keys["revision"]} if keys.get("revision") else {}
        vocab = keys.get("vocab", "same")
        if vocab == "intersection":
            settings["use_heterogeneous_vocab"] = True
            note += "; a vLLM without use_heterogeneous_vocab needs a draft model of the target's vocabulary"
        elif vocab != "same":
            return f"none: vLLM does not draft by text ({_vocab(keys)})"
    elif drafter == "ngram":
        settings = {"method": "ngram", "prompt_lookup_min": keys["min_n"], "prompt_lookup_max": keys["max_n"]}
    else:
        return f"none: vLLM has no {drafter}"
    return "--speculative-config " + shlex.quote(json.dumps(settings | {"num_speculative_tokens": chain})) + note


def unserved(drafter: str, keys: Mapping[str, Any]) -> str | None:
    """Why no server can draft with this small LM, which has no checkpoint of its own."""
    if drafter != "small_lm":
        return None
    if keys.get("layers") is not None:
        return f"does not draft with the target's own first layers (drafter.layers={keys['layers']})"
    if keys.get("id") is None or is_student(keys["id"]):
        return "cannot load a distilled small LM, whose embedding and vocabulary matrix are the target's"
    return None


def _vocab(keys: Mapping[str, Any]) -> str:
    return f"drafter.vocab={keys['vocab']}"


def export(
    drafter: str, keys: Mapping[str, Any], tree: Mapping[str, int], target: str = "", given: Sequence[str] = ()
) -> str | None:
    """The command that writes the head for both, if it is one of ours. `given` = overrides of the search, of which those that
    name the target and say how the head is read are the export's, too."""
    if drafter not in ("eagle", "medusa"):
        return None
    ckpt = keys.get("ckpt", "auto")
    if ckpt == "auto" and drafter == "medusa":
        ckpt = shipped(drafter, target)
    head = [
        text.removeprefix("drafter.") for text in given if text.startswith(("drafter.revision=", "drafter.config="))
    ]
    model = [text for text in given if text.startswith(("target=", "target.", commands.SEARCH))]
    shape = [f"tree.{key}={value}" for key, value in tree.items()]
    own = ckpt if re.fullmatch(r"[\w./-]+", str(ckpt)) else commands.quoted(str(ckpt))
    return commands.line([f"ckpt={own}", f"out={HEAD}", *head, *model, *shape], "specresearch.export")
