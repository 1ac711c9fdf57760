"""A draft model with a tokenizer of its own, made from text that the target wrote: something to draft with across vocabularies.

    python experiments/vocabulary.py [out=FOLDER] [tokens=1024] [width=128] [layers=2] [minutes=3] [steps=MOST] [data=FOLDER]
        [target=... overrides]

A byte-level BPE is trained on the dialogues in `data` (those shipped for the built-in target), then a small Llama on its
tokens. `out` is used with `drafter=small_lm drafter.id=FOLDER drafter.vocab=intersection` (or `text`).
`experiments/vocabulary.md` holds recorded results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specresearch.build import engine
from specresearch.training.dataset import read_all

ROOT = Path(__file__).resolve().parents[1]
SPECIAL = ("<|im_start|>", "<|im_end|>")  # what a chat is made of; all other words are the tokenizer's own
WINDOW, BATCH, RATE = 256, 8, 2e-3


def tokenizer_of(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[1], pad_token=SPECIAL[1])


def model_of(tokenizer: PreTrainedTokenizerFast, width: int, layers: int) -> Any:
    heads = max(1, width // 32)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def train(model: Any, stream: Tensor, seconds: float, most: int) -> float:
    """Windows of the `stream` [T] at random, until the time or `most` steps are over -> the mean loss of the last steps"""
    dice, losses, began, done = torch.Generator().manual_seed(0), [], time.monotonic(), 0.0
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    while done < 1:
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (len(losses) + 1) / 50, 1.02 - done)
        at = torch.randint(len(stream) - WINDOW, (BATCH, 1), generator=dice)
        ids = stream[at + torch.arange(WINDOW)]
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
        done = max(len(losses) / most, (time.monotonic() - began) / seconds)
    model.eval()
    return sum(losses[-20:]) / len(losses[-20:])


def make(target: Any, out: Path, data: Path, tokens: int, width: int, layers: int, seconds: float, most: int) -> str:
    """-> what was made, in one line"""
    texts = [target.tokenizer.decode(d.tokens) for d in read_all(data) if not d.held_out]
    if not texts:
        raise SystemExit(f"error: {data} holds no dialogues: give data=FOLDER, made by specresearch.train stage=data")
    tokenizer = tokenizer_of(texts, tokens)
    stream = torch.tensor([id for line in tokenizer(texts).input_ids for id in line])
    model = model_of(tokenizer, width, layers)
    loss = train(model, stream, seconds, most)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = sum(weight.numel() for weight in model.parameters())
    return (
        f"{out}: {size:,} parameters, {len(tokenizer)} tokens, trained on {len(stream):,}, loss {loss:.2f} nats a token"
    )


def main(arguments: list[str]) -> None:
    own = {"out": "runs/vocabulary", "tokens": "1024", "width": "128", "layers": "2", "minutes": "3"}
    own |= {"steps": str(1 << 30), "data": str(ROOT / "checkpoints" / "smollm2" / "data")}
    own |= dict(a.split("=", 1) for a in arguments if a.partition("=")[0] in own)
    given = [a for a in arguments if a.partition("=")[0] not in own]
    target = engine("drafter=none", "tracker=none", *given).parts.target
    counts = (int(own[key]) for key in ("tokens", "width", "layers"))
    print(make(target, Path(own["out"]), Path(own["data"]), *counts, 60 * float(own["minutes"]), int(own["steps"])))


if __name__ == "__main__":
    main(sys.argv[1:])
