"""xgrammar, imported nowhere else: a grammar, compiled for the tokens of one target, and where an answer stands in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specresearch.types import Target, UserError


def library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        lacking = "xgrammar" if error.name == "xgrammar" else f"xgrammar whole ({error})"
        raise UserError(f"grammar= needs {lacking}: pip install -e '.[grammar]', or leave grammar out") from None
    return xgrammar


def parse(kind: str, text: str, options: dict[str, Any], said: str) -> Any:
    """-> the library's own grammar, of no vocabulary yet. Raises UserError, which starts with `said`, for what it refuses."""
    make: Callable[..., Any] = getattr(library().Grammar, f"from_{kind}")
    try:
        return make(text, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        where = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", " ".join(str(error).split()))
        raise UserError(f"{said} is no grammar that xgrammar takes: {where[:200]}") from None


class Compiled:
    """A grammar in the tokens of one target. `origin` tells it from others; `draft`: drafts are to follow it, too."""

    def __init__(self, grammar: Any, target: Target, origin: str, kind: str, draft: bool):
        self.xgrammar, self.vocab_size, self.eos = library(), target.vocab_size, target.eos
        self.origin, self.kind, self.draft = origin, kind, draft
        self.device = target.device
        tokens = vocabulary(self.xgrammar, target)
        compiler = self.xgrammar.GrammarCompiler(tokens, max_threads=torch.get_num_threads(), cache_enabled=False)
        self.compiled = compiler.compile_grammar(grammar)
        self.silent = frozenset(tokens.special_token_ids) - {*self.eos}

    def matcher(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """The tokens of one answer so far, as far as they follow the grammar."""

    def __init__(self, grammar: Compiled):
        self.grammar, self.inner = grammar, grammar.xgrammar.GrammarMatcher(grammar.compiled)
        self.terminated = False

    def accept(self, token: int) -> bool:
        if self.terminated or token in self.grammar.silent or not 0 <= token < self.grammar.vocab_size:
            return False  # the library would say so on the console as well
        accepted = self.inner.accept_token(token)
        self.terminated = accepted and token in self.grammar.eos
        return accepted

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)
            self.terminated = False

    def fill(self, allow: Tensor, row: int) -> None:
        self.inner.fill_next_token_bitmask(allow, row)


def vocabulary(xgrammar: Any, target: Target) -> Any:
    """What each token writes. Those that the tokenizer leaves out of a text write nothing, and no grammar has a place for
    them; xgrammar alone would read their names as text."""
    tokenizer = getattr(target, "tokenizer", None)
    if tokenizer is None or not target.eos:
        lacks = "tokenizer" if tokenizer is None else "end-of-text token"
        raise UserError(
            f"a grammar needs a target with a tokenizer and an end-of-text token, and this one has no {lacks}"
        )
    stops = {"vocab_size": target.vocab_size, "stop_token_ids": list(target.eos)}
    try:
        plain = xgrammar.TokenizerInfo.from_huggingface(tokenizer, **stops)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"xgrammar cannot read this tokenizer: {' '.join(str(error).split())[:160]}") from None
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
    names = [""] * target.vocab_size
    for name, token in tokenizer.get_vocab().items():
        if token < target.vocab_size and (token not in special or token in target.eos):
            names[token] = name
    return xgrammar.TokenizerInfo(names, plain.vocab_type, add_prefix_space=plain.add_prefix_space, **stops)
