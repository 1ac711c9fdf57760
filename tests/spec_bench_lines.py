"""Made-up questions in Spec-Bench's format."""

import json
from pathlib import Path
from typing import Any

CATEGORIES = ("writing", "roleplay", "translation", "summarization", "qa", "math_reasoning", "rag")


def questions(each: int) -> list[dict[str, Any]]:
    """`each` questions in every category, category by category; MT-bench's have a second turn, some a reference."""
    found = []
    for category in CATEGORIES:
        for number in range(each):
            turns = [f"{category} {number} ab ab ab"]
            if category in ("writing", "roleplay"):
                turns.append("Again, please.")
            found.append({"question_id": 81 + len(found), "category": category, "turns": turns})
    return [q | {"reference": ["x"]} if q["category"] == "qa" else q for q in found]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
