"""A random Llama of a few thousand parameters with a byte tokenizer: for tests, and for trying things in seconds."""

from __future__ import annotations

import tempfile

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import logging as transformers_logging

from specresearch.models.hf import HFModel
from specresearch.models.loading import resolve_device, resolve_dtype
from specresearch.models.sharded import load_sharded, require_divides, require_group


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then the end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)} | {"<eos>": len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def load(
    *,
    dtype: str | None = None,
    device: str = "auto",
    seed: int = 0,
    layers: int = 2,
    vocab_size: int | None = None,
    tp: int = 1,
) -> HFModel:
    group = require_group(tp)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.5,  # wide enough that the laws differ from place to place
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    where = resolve_device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model = model.to(device=where, dtype=resolve_dtype(dtype, where))
    if group is not None:
        require_divides(config, tp, "tiny")
        with tempfile.TemporaryDirectory() as folder:  # a model is split as it is read
            place = group.agree(folder)
            if not group.rank:
                transformers_logging.disable_progress_bar()
                model.save_pretrained(place)
            group.agree(None)
            model = load_sharded(place, group, dtype=model.dtype)
            group.agree(None)
    return HFModel(model, tokenizer, "tiny", group=group)
