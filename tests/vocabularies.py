"""Draft models of other vocabularies than the tiny target's, which has one token per byte."""

import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specresearch.models.spelling import byte_alphabet


def byte_level(vocabulary, merges=(), **special):
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def sentencepiece(vocabulary, merges=(), **special):
    """As Llama 2's: `▁` for a space, one in front of every text, and a token for each byte."""
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", **special)


def permuted(target, folder, *, without=(), merges=(), extra=0, seed=0):
    """The tiny target itself under other ids: its rows of embedding and head moved to new places, some bytes left out, some
    tokens added. Saved in `folder`."""
    signs = {byte: sign for sign, byte in byte_alphabet().items()}
    old = target.tokenizer.get_vocab()
    names = [signs[byte] for byte in range(256) if byte not in without] + ["<end>"]
    names += ["".join(pair) for pair in merges] + [f"Ġword{i}" for i in range(extra)]
    random.Random(seed).shuffle(names)
    vocabulary = {name: id for id, name in enumerate(names)}
    tokenizer = byte_level(vocabulary, merges, eos_token="<end>", pad_token="<end>")
    config = LlamaConfig.from_dict(target.model.config.to_dict() | {"vocab_size": len(names)})
    config.eos_token_id = config.pad_token_id = vocabulary["<end>"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(target.dtype)
        kept = {n: t for n, t in target.model.state_dict().items() if "embed" not in n and "lm_head" not in n}
        model.load_state_dict(kept, strict=False)
        rows = target.model.get_input_embeddings().weight
        for name, id in vocabulary.items():
            if (place := old.get("<eos>" if name == "<end>" else name)) is not None:
                model.get_input_embeddings().weight[id] = rows[place]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def random_model(tokenizer, folder, *, positions=4096, seed=3):
    """A model of two layers for `tokenizer`, saved in `folder`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        initializer_range=0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).double().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
