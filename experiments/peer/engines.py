"""The rows of experiments/peers.py: transformers' own decoding, every drafter of two other libraries, and ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peer.libraries import (
    Decode,
    Setting,
    assisted,
    cannot,
    config_of,
    draft_model,
    eagle3,
    early_exit,
    economize,
    flashspec,
    frspec,
    generate,
    keep_skipped,
    layer_skip,
    medusa,
    our_heads,
    ours,
)
from peer.plain_models import Models

from specresearch.types import UserError


@dataclass(frozen=True)
class Engine:
    """A row. Its first setting is the library's own default; `tune=true` tries the others too."""

    library: str
    what: str
    start: Callable[[Models, Any], Decode]
    settings: Sequence[Setting] = field(default_factory=lambda: [{}])
    dtype: torch.dtype | None = None  # None: as the target computes


def cycles(*lengths: int, **more: Any) -> list[Setting]:
    return [{"cycle_length": n, **more} for n in lengths]


def trees(*shapes: tuple[int, int, int]) -> list[Setting]:
    """(depth, topk, size)"""
    return [{"overrides": [f"tree.depth={d}", f"tree.topk={k}", f"tree.size={n}"]} for d, k, n in shapes]


def chains(*depths: int) -> list[Setting]:
    return [{"overrides": ["tree=chain", f"tree.depth={d}"]} for d in depths]


HF, FLASHSPEC, ECONOMIZE, OURS = "transformers", "flashspec", "economize", "ours"
WAITS = [
    {"num_assistant_tokens": n, "assistant_confidence_threshold": c}
    for n, c in ((20, 0.4), (5, 0.4), (3, 0.0), (2, 0.0))
]
AUTO = {"overrides": ["tree=auto"]}  # left out where it is not to be had
ENGINES: dict[str, Engine] = {
    "hf": Engine(HF, "generate", generate(lambda *_: {})),
    "hf_bf16": Engine(HF, "generate, bfloat16", generate(lambda *_: {}, torch.bfloat16), dtype=torch.bfloat16),
    "hf_lookup": Engine(
        HF, "prompt lookup", generate(lambda _, s: s), [{"prompt_lookup_num_tokens": n} for n in (10, 5, 3)]
    ),
    "hf_assisted": Engine(HF, "assisted, our small LM", generate(assisted), WAITS),
    "flashspec_lookup": Engine(FLASHSPEC, "lookup", flashspec("lookup"), [{"gamma": n} for n in (4, 2, 6)]),
    "flashspec_model": Engine(
        FLASHSPEC, "draft model, our small LM", flashspec("model"), [{"gamma": n} for n in (4, 2, 1)]
    ),
    "flashspec_hybrid": Engine(
        FLASHSPEC,
        "lookup, else our small LM",
        flashspec("model", "lookup"),
        [{"strategy": name} for name in ("composite-g6-f2", "composite-g4")],
    ),
    "economize_lookup": Engine(
        ECONOMIZE, "lookup", economize(lambda *_: config_of("lookup", "LookupConfig")), cycles(4, 3, 7)
    ),
    "economize_model": Engine(ECONOMIZE, "draft model, our small LM", economize(draft_model), cycles(4, 3, 2)),
    "economize_hybrid": Engine(
        ECONOMIZE,
        "lookup, else our small LM",
        economize(
            lambda m, s: config_of("hybrid", "HybridConfig", fallback=draft_model(m, s), max_drafts=s.get("most"))
        ),
        [*cycles(4, 3), *cycles(7, most=2)],
    ),
    "economize_exit": Engine(
        ECONOMIZE,
        "early exit",
        economize(early_exit),
        [*cycles(4, depth=0.5), *cycles(2, depth=0.3), *cycles(2, depth=0.5)],
    ),
    "economize_frspec": Engine(
        ECONOMIZE, "early exit, our draft vocabulary", economize(frspec), [*cycles(4, depth=0.5), *cycles(2, depth=0.3)]
    ),
    "economize_skip": Engine(
        ECONOMIZE, "layer skipping", economize(layer_skip, keep_skipped), cycles(4, 2, share=0.34)
    ),
    "economize_medusa": Engine(ECONOMIZE, "Medusa, our heads", economize(medusa, our_heads), cycles(4, 3, 2)),
    "economize_eagle3": Engine(ECONOMIZE, "EAGLE-3, our head", eagle3),
    "economize_jump": Engine(
        ECONOMIZE, "jump", cannot("its predictor must be trained, and none is published for this target")
    ),
    "economize_mtp": Engine(ECONOMIZE, "multi-token prediction", cannot("this target ships no such modules")),
    "plain": Engine(OURS, "plain", ours("plain", "drafter=none")),
    "ngram": Engine(OURS, "ngram", ours("ngram", "drafter=ngram"), [{}, *chains(3, 5, 7), *trees((4, 2, 6)), AUTO]),
    "medusa": Engine(OURS, "medusa", ours("medusa", "drafter=medusa"), [{}, *trees((1, 4, 4), (2, 2, 4))]),
    "small_lm": Engine(
        OURS, "small_lm", ours("small_lm", "drafter=small_lm"), [{}, *chains(1, 2, 3), *trees((1, 3, 4))]
    ),
    "eagle": Engine(OURS, "eagle", ours("eagle", "drafter=eagle")),
    "eagle_tuned": Engine(
        OURS,
        "eagle, tuned tree",
        ours("eagle_tuned", "drafter=eagle"),
        [{}, *trees((1, 3, 4), (1, 2, 3), (2, 2, 4), (3, 2, 6), (3, 4, 8)), *chains(2, 3), AUTO],
    ),
}


def start(name: str, models: Models, setting: Setting) -> Decode:
    """Raises UserError that says why it cannot run."""
    engine = ENGINES[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return engine.start(models, setting)
    except (ImportError, UserError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in (FLASHSPEC, ECONOMIZE)
        raise UserError(
            f"{error.name} is not installed: pip install --no-deps it, or '.[peers]'" if missing else str(error)
        ) from None
