"""Whether a text shares words with the evaluation prompts, and whether it repeats itself: by n-grams of words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b

GRAM = 8  # words in a row that two texts written apart hardly ever share


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(text: str, n: int = GRAM) -> set[int]:
    """Hashes of all runs of n words; a text of fewer words counts as one run."""
    found = words(text)
    return {_hash(" ".join(found[i : i + n])) for i in range(max(1, len(found) - n + 1))} if found else set()


def fingerprint(text: str) -> int:
    """The same for texts that differ in case, spaces and signs only."""
    return _hash(" ".join(words(text)))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class Overlap:
    """Finds runs of `n` words of the evaluation texts in other texts."""

    def __init__(self, texts: Iterable[str], n: int = GRAM):
        self.n = n
        self.known: set[int] = set().union(*(grams(text, n) for text in texts))

    def __call__(self, text: str) -> bool:
        return not self.known.isdisjoint(grams(text, self.n))


def loop_start(tokens: Sequence[int], most: int = 32, times: int = 3) -> int | None:
    """Where the end of `tokens` begins to repeat itself: the start of the second of at least `times` equal runs."""
    for period in range(1, most + 1):
        need = max(period * times, 12)
        if len(tokens) >= need and all(tokens[-i] == tokens[-i - period] for i in range(1, need - period + 1)):
            return len(tokens) - need + period
    return None
