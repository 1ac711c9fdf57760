"""Where questions come from. A question is a list of user turns; a later turn sees the answers to the earlier ones."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specresearch.types import UserError


@dataclass(frozen=True)
class Question:
    id: int | str
    kind: str
    turns: tuple[str, ...]


def builtin() -> list[Question]:
    """Eight prompts in each of seven kinds, round-robin, so that the first 7k hold k of each kind."""
    return file(path=str(Path(__file__).parent / "builtin.jsonl"))


SIGN = "\ue000"  # stands for the "$" of "${" on the way through the configuration, which would resolve it


def text(*, text: str) -> list[Question]:
    text = text.replace(SIGN, "$") if isinstance(text, str) else text
    return [question({"id": 0, "kind": "text", "prompt": text}, "prompts.text", 0)]


def file(*, path: str) -> list[Question]:
    """JSON lines with `prompt` or `turns`, and optionally `id`, `kind`; or Spec-Bench's `question_id`, `category`, `turns`."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # not splitlines: U+2028 may stand in a text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"prompts.path={path} cannot be read: {reason}") from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON ({error.msg}): put one object on each line") from None
        questions.append(question(fields, f"{path} line {number}", number - 1))
    return distinct(questions, path)


def hf(*, id: str, name: str | None, split: str, field: str, kind: str | None) -> list[Question]:
    """Column `field` (a text, or a list of turns) of a dataset from the Hub or a local folder."""
    rows = loaded(f"prompts.id={id}", id, name, split)
    if field not in rows.column_names:
        raise UserError(f"prompts.field={field} is no column of {id}: it has {', '.join(rows.column_names)}")
    questions = []
    for number, row in enumerate(rows):
        turns = row[field] if isinstance(row[field], list) else [row[field]]
        fields = {"id": number, "kind": str(row[kind]) if kind else id, "turns": turns}
        questions.append(question(fields, f"{id} row {number}", number))
    return questions


def loaded(said: str, id: str, name: str | None, split: str, **more: Any) -> Any:
    """A dataset by datasets' name for it; `said` is what the user wrote. Raises UserError, in one line, where that fails."""
    import datasets

    talkative = logging.getLogger("huggingface_hub")
    level = talkative.level
    talkative.setLevel(logging.ERROR)  # it says every retry of a lost network
    try:
        return datasets.load_dataset(id, name, split=split, **more)
    except Exception as error:  # datasets raises many kinds, from its own and from other libraries
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        local = (
            ""
            if more
            else "; a copy on disk needs no network: prompts.path=FILE where the option has it, or prompts=file"
        )
        raise UserError(f"{said}: the dataset cannot be loaded: {reason}{local}") from None
    finally:
        talkative.setLevel(level)


def question(fields: Any, where: str, number: int) -> Question:
    if not isinstance(fields, dict) or not ("prompt" in fields or "turns" in fields):
        raise UserError(f'{where}: an object with "prompt" (a text) or "turns" (a list of texts) is needed')
    turns = fields["turns"] if "turns" in fields else [fields["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise UserError(f'{where}: "prompt" must be a text, "turns" a list of texts')
    if not all(turn.strip() for turn in turns):
        raise UserError(f"{where}: the prompt is empty")
    if any("\ud800" <= letter <= "\udfff" for turn in turns for letter in turn):
        raise UserError(f"{where}: the prompt holds half of a surrogate pair, which is no text")
    id = fields.get("id", fields.get("question_id", number))
    if not isinstance(id, int | str) or isinstance(id, bool):
        raise UserError(f"{where}: the id must be a number or a text")
    return Question(id, str(fields.get("kind", fields.get("category", "prompt"))), tuple(turns))


def distinct(questions: list[Question], where: str) -> list[Question]:
    """Ids seed the randomness and name the lines of the trace, so each may occur once."""
    seen: set[str] = set()
    for q in questions:
        if str(q.id) in seen:
            raise UserError(f"{where}: the id {q.id!r} occurs twice")
        seen.add(str(q.id))
    if not questions:
        raise UserError(f"{where} holds no prompts")
    return questions
