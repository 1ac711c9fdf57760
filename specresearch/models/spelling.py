"""What the tokens of a tokenizer write, in bytes, so that tokens of two tokenizers can be compared.

A byte-level token is spelled in an alphabet of 256 printable signs (`Ġ` is a space), a SentencePiece one in Unicode with `▁`
for a space and `<0x0A>` for a byte without a token of its own. In bytes the two are the same thing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specresearch.types import UserError

SPACE = "\u2581"  # SentencePiece's


def byte_alphabet() -> dict[str, int]:
    """The sign that stands for each byte in byte-level vocabularies, since GPT-2 -> {sign: byte}"""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Spelling:
    """`pieces[id]` = the bytes that a token writes, None for one that writes none: a special or a padded one.
    `ids` = the token that writes some bytes: the ordinary one, where an added token or a byte fallback does so too.
    `specials` = ids of the special tokens by their names. Only ids below `size` count. The tokenizer stays as it is.
    """

    def __init__(self, tokenizer: Any, size: int, name: str):
        self.tokenizer = tokenizer
        kind, alphabet = kind_of(tokenizer, name), byte_alphabet()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.pieces: list[bytes | None] = [None] * size
        self.specials: dict[str, int] = {}
        ranked = []
        for token, id in tokenizer.get_vocab().items():
            if id >= size:
                continue
            if id in special:
                self.specials[token] = id
                continue
            fallback = kind == "sentencepiece" and _is_byte(token)
            self.pieces[id] = piece = _written(token, kind, alphabet, id in added)
            ranked.append((fallback, id in added, id, piece))
        self.ids: dict[bytes, int] = {}
        for *_, id, piece in sorted(ranked):
            if piece:
                self.ids.setdefault(piece, id)
        self.longest = max(map(len, self.ids), default=0)

    def join(self, ids: Iterable[int]) -> bytes | None:
        """What tokens write together; None if one of them writes nothing."""
        pieces = [self.pieces[id] if id < len(self.pieces) else None for id in ids]
        return None if None in pieces else b"".join(pieces)  # type: ignore[arg-type]

    def encode(self, data: bytes, opening: bool = False) -> list[int]:
        """Tokens that write exactly `data`: the tokenizer's own where they do, else the longest that fit. At the `opening` of
        a text the tokenizer may put its space in front."""
        if not data:
            return []
        try:
            text = data.decode()
        except UnicodeDecodeError as fault:  # the middle of a character
            begin, end = fault.start, fault.end
            return self.encode(data[:begin], opening) + self._fit(data[begin:end]) + self.encode(data[end:])
        found = self._own(text, data, opening)
        if found is None and (space := text.find(" ", 1)) > 0:  # it puts a space before what begins inside a word
            head, rest = text[:space], text[space:]
            tail = self._own(rest, rest.encode(), False)
            found = None if tail is None else self._fit(head.encode()) + tail
        return self._fit(data) if found is None else found

    def _own(self, text: str, data: bytes, opening: bool) -> list[int] | None:
        """By the tokenizer, if that writes `data`: it may add a space, normalise, or read a special token's name."""
        for words in (text, text[1:]) if text.startswith(" ") else (text,):
            ids = list(self.tokenizer(words, add_special_tokens=False).input_ids)
            if self.join(ids) in ((data, b" " + data) if opening else (data,)):
                return ids
        return None

    def _fit(self, data: bytes) -> list[int]:
        """The longest token that fits, again and again; bytes that no token writes are left out."""
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self.longest), at, -1)
            end = next((end for end in ends if data[at:end] in self.ids), None)
            if end is not None:
                ids.append(self.ids[data[at:end]])
            at = end or at + 1
        return ids


def kind_of(tokenizer: Any, name: str) -> str:
    """ "bytes" or "sentencepiece", by the tokenizer's own decoder. Raises UserError for any other."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{name} comes without a fast tokenizer (tokenizer.json), so its tokens cannot be compared")
    decoder = json.loads(backend.to_str())["decoder"] or {}
    parts = decoder.get("decoders", [decoder])
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return "bytes"
    if "Metaspace" in kinds or any(part.get("pattern") == {"String": SPACE} for part in parts):
        return "sentencepiece"
    raise UserError(
        f"the tokenizer of {name} is neither byte-level nor of SentencePiece's kind: what its tokens write is not known, so "
        "use a drafter of the target's vocabulary, or another drafter"
    )


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _written(token: str, kind: str, alphabet: Mapping[str, int], added: bool) -> bytes:
    if added:
        return token.encode()
    if kind == "bytes":
        return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()
    return bytes([int(token[3:5], 16)]) if _is_byte(token) else token.replace(SPACE, " ").encode()


def twins(ours: Spelling, theirs: Spelling, ends: tuple[Sequence[int], Sequence[int]]) -> dict[int, int]:
    """Special tokens that mean the same -> {ours: theirs}: by name, and the ends of text (`ends` = ours, theirs, the chief one
    first) by what they are for."""
    same = {id: theirs.specials[name] for name, id in ours.specials.items() if name in theirs.specials}
    if not set(ends[1]) & set(same.values()):
        same |= {mine: other for mine, other in zip(ends[0][:1], ends[1][:1]) if mine not in same}
    return same


def shared(ours: Spelling, theirs: Spelling, special: Mapping[int, int]) -> list[tuple[int, int]]:
    """Tokens that write the same in both, and special ones that mean the same -> (our id, their id), ascending by ours.
    No id occurs twice on either side."""
    pairs = dict(special)
    pairs |= {id: theirs.ids[piece] for piece, id in ours.ids.items() if piece in theirs.ids}
    return sorted(pairs.items())
