"""How user turns begin. The target writes on from an opening; longer turns quote a text that it wrote in an earlier answer.

The wording is our own (`openings.yaml`). None of it is an evaluation prompt (`overlap.py` checks that).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

WORDS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "openings.yaml").read_text(encoding="utf-8"))
SHARES = {  # kind: share of the dialogues
    **{"free": 8, "conversation": 15, "qa": 16, "math": 14, "code": 10, "translation": 9},
    **{"summarization": 9, "rewrite": 5, "rag": 8, "code_edit": 8},
}
LONG = frozenset({"summarization", "rewrite", "rag", "code_edit"})


@dataclass(frozen=True)
class Opening:
    """`text` is given, the target writes the rest of the user turn unless it is `closed`."""

    kind: str
    text: str
    closed: bool
    held_out: bool = False  # quotes an answer from the held-out part


@dataclass
class Sources:
    """Texts and code that the target wrote earlier, by whether they belong to the held-out part."""

    texts: dict[bool, list[str]] = field(default_factory=lambda: {False: [], True: []})
    code: dict[bool, list[str]] = field(default_factory=lambda: {False: [], True: []})

    def learn(self, answer: str, held_out: bool) -> None:
        for block in re.findall(r"```\w*\n.+?```", answer, re.DOTALL):
            if 60 <= len(block) <= 700:
                self.code[held_out].append(block)
        if "```" not in answer and len(answer) >= 200:
            self.texts[held_out].append(cut(answer, 800))


def cut(text: str, limit: int) -> str:
    """The first `limit` characters, back to the end of a sentence or a line."""
    text = text.strip()
    if len(text) <= limit:
        return text
    ends = [m.end() for m in re.finditer(r"[.!?](?=\s)|\n", text[:limit])]
    return text[: ends[-1]].strip() if ends and ends[-1] > limit // 3 else text[:limit].rsplit(" ", 1)[0]


def draw(chance: random.Random, sources: Sources, long: bool, held_share: float) -> Opening:
    """The next opening: one that quotes an earlier answer if `long` (and there is one to quote), else a short one."""
    kinds = [k for k in SHARES if (k in LONG) == long]
    kind = chance.choices(kinds, [SHARES[k] for k in kinds])[0]
    held = chance.random() < held_share
    pool = sources.code[held] if kind == "code_edit" else sources.texts[held]
    if kind in LONG and len(pool) < 2:
        kind = "code" if kind == "code_edit" else "qa"
    return _long(kind, chance, pool, held) if kind in LONG else _short(kind, chance)


def _short(kind: str, chance: random.Random) -> Opening:
    if kind == "free":
        return Opening(kind, "", False)
    if kind == "translation":
        language = chance.choice(list(WORDS["languages"]))
        text = chance.choice(WORDS["translate"]).format(language=language)
        return Opening(kind, f"{text}\n\n{chance.choice(WORDS['languages'][language])}", False)
    text = chance.choice(WORDS[kind])
    first, second = chance.sample(WORDS["names"], 2)
    words = {
        "topic": chance.choice(WORDS["topics"]),
        "name": first,
        "name2": second,
        "things": chance.choice(WORDS["things"]),
    }
    numbers = {"n": chance.randint(3, 120), "m": chance.randint(2, 20)}
    return Opening(kind, text.format(**words, **numbers), False)


def _long(kind: str, chance: random.Random, pool: list[str], held: bool) -> Opening:
    source = chance.choice(pool)
    if kind == "code_edit":
        names = sorted(set(re.findall(r"\b[a-z][a-z_]{2,}\b", source))) or ["value"]
        task = chance.choice(WORDS["edit"]).format(old=chance.choice(names), new=chance.choice(WORDS["identifiers"]))
        return Opening(kind, f"{task}\n\n{source}", True, held)
    if kind == "rag":
        pieces = [cut(p, 330) for p in chance.sample(pool, 2)]
        style = chance.choice(["[{}] ", "({}) ", "Document {}: ", "- "])
        notes = "\n\n".join(style.format(i) + p for i, p in enumerate(pieces, 1))
        return Opening(kind, f"{chance.choice(WORDS['rag'])}\n\n{notes}\n\nQuestion:", False, held)
    tasks = WORDS["summarize"] if kind == "summarization" else WORDS["rewrite"]
    task = chance.choice(tasks)
    if kind == "rewrite" and chance.random() < 0.25:
        task, source = (
            chance.choice(WORDS["into"]).format(language=chance.choice(list(WORDS["languages"]))),
            cut(source, 250),
        )
    return Opening(kind, f"{task}\n\n{source}" if chance.random() < 0.75 else f"{source}\n\n{task}", True, held)
