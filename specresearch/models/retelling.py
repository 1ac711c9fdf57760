"""A draft's text in the target's tokens: what is common to both tokenizers is the text alone.

After universal assisted generation (transformers): the draft is read together with the newest text that it goes on from, so
that both are cut as the target's tokenizer would cut the whole, and the draft is what lies behind the last token in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specresearch.models.spelling import Spelling


def retell(
    recent: Sequence[int], drafted: Sequence[int], ours: Spelling, theirs: Spelling, special: Mapping[int, int]
) -> list[tuple[int, int]]:
    """`drafted` tokens of the draft model that follow the target's `recent` ones -> the target's tokens, each with the number
    of drafted tokens that it takes to know it. A special token ends the draft, and is told if the target has it
    (`special` = the target's id of it)."""
    ends: list[int] = []  # of each drafted token, in bytes
    text, last = b"", []
    for count, token in enumerate(drafted, 1):
        piece = theirs.pieces[token] if token < len(theirs.pieces) else None
        if piece is None:
            last = [(special[token], count)] if token in special else []
            break
        text += piece
        ends.append(len(text))
    told, end, count = [], 0, 0
    for token in aligned(recent, text, ours):
        end += len(ours.pieces[token] or b"")
        while count < len(ends) and ends[count] < end:
            count += 1
        told.append((token, count + 1))
    return told + last


def aligned(recent: Sequence[int], text: bytes, ours: Spelling) -> list[int]:
    """Tokens of `text`, cut as behind the text of `recent`; on its own if a token would reach over the seam, for what was
    emitted stays as it is."""
    before = b""
    for token in reversed(recent):
        piece = ours.pieces[token] if token < len(ours.pieces) else None
        if piece is None:
            break
        before = piece + before
    end, ids = 0, ours.encode(before + text)
    for place, token in enumerate(ids):
        if end >= len(before):
            return ids[place:] if end == len(before) else ours.encode(text)
        end += len(ours.pieces[token] or b"")
    return ours.encode(text)
