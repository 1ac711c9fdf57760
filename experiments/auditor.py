"""transformers' own sampled generation, audited: is assisted decoding lossless, with the same vocabulary and with others?

    python experiments/auditor.py [tokens=3000] [overrides ...]

The target is a random Llama of a few thousand parameters (target=tiny); its assistants are made here: one with its
vocabulary, one with a part of it, one with tokens that it lacks. Each mode's tokens are judged by the black box of
`specresearch.lossless`. `experiments/auditor.md` holds a recorded result.
"""

from __future__ import annotations

import itertools
import string
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging
from transformers import __version__ as transformers_version
from transformers.generation.candidate_generator import AssistantVocabTranslatorCache

import specresearch
from specresearch import audited
from specresearch.conversations import Settings
from specresearch.decode import Parts
from specresearch.lossless.blackbox import BlackBox
from specresearch.lossless.reference import Reference, judge
from specresearch.prompts import Question
from specresearch.types import UserError

MERGES = [("t", "h"), ("h", "e"), ("i", "n"), ("e", "r"), ("a", "n")]  # what the assistant has and the target lacks


def tokenizer(symbols: list[str], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    vocabulary = {symbol: i for i, symbol in enumerate([*symbols, *map("".join, merges), "<eos>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def assistant(folder: Path, kind: str) -> str:
    """Write an assistant -> its folder"""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "part":
        symbols = [s for s in symbols if s not in string.ascii_uppercase]
    tokens = tokenizer(symbols, MERGES if kind == "other" else [])
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokens),
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"num_key_value_heads": 4, "max_position_embeddings": 4096, "initializer_range": 0.5},
        **{"eos_token_id": tokens.eos_token_id, "bos_token_id": None, "pad_token_id": tokens.pad_token_id},
    )
    logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(folder / kind)
    tokens.save_pretrained(folder / kind)
    return str(folder / kind)


def modes(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """-> what is audited, the assistant, whether transformers prunes its head to the shared tokens (as it does by itself)"""
    yield "plain", "none", True
    yield "prompt lookup", "lookup", True
    yield "assistant, same vocabulary", assistant(folder, "same"), True
    for kind, name in (("part", "a part of the vocabulary"), ("other", "tokens that the target lacks")):
        yield f"assistant, {name}", assistant(folder, kind), True
        yield f"assistant, {name}; head not pruned", assistant(folder, kind), False


def audit(parts: Parts, where: str, prune: bool, tokens: int) -> BlackBox:
    words = ["the rain in spain", "then her thin hand", "an errand in the inn", "he ran there and then"]
    questions = [Question(i, "text", (text,)) for i, text in enumerate(words)]
    settings = Settings(0, None, 32, 1, [], False, False, False)
    generation = audited.Generation(parts.target, where)
    if not prune:  # transformers asks this cache first
        extra: Any = generation.extra
        made = (extra["assistant_tokenizer"], parts.target.vocab_size, extra["assistant_model"], False)
        AssistantVocabTranslatorCache.get_translator(extra["tokenizer"], *made)
    lines = generation.answers(questions, settings, parts.sampler)
    box, reference = BlackBox(), Reference(parts.target, parts.sampler)
    for line in itertools.takewhile(lambda _: box.tokens < tokens and box.verdict != "violation", lines):
        judge(reference, [line], box)
    return box


def main(arguments: list[str]) -> None:
    own = dict(a.split("=", 1) for a in arguments if a.startswith("tokens="))
    given = [a for a in arguments if not a.startswith("tokens=")]
    parts = specresearch.engine("target=tiny", "drafter=none", "temperature=1", *given).parts
    print(f"transformers {transformers_version}, torch {torch.__version__}\n")
    print("| sampled generation | verdict | tokens | log10 E (violation from 3) | seen with probability 0.9: TV |")
    print("|---|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, where, prune in modes(Path(folder)):
            try:
                found = audit(parts, where, prune, int(own.get("tokens", 3000))).report()
            except UserError as error:
                print(f"| {name} | {error} | | | |", flush=True)
                continue
            seen = "-" if found.resolution is None else f"{found.resolution:.2f}"
            print(f"| {name} | {found.verdict} | {found.tokens} | {found.log10_e_sup:.1f} | {seen} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
