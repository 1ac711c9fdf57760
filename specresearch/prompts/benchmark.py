"""Common benchmarks as prompts, from the Hub or from a file in the set's own format: `prompts=humaneval|gsm8k|mt_bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specresearch.prompts import Question, distinct, loaded, question
from specresearch.types import UserError

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def benchmark(
    *, id: str, name: str | None, split: str, fields: Sequence[str], kind: str, path: str | None
) -> list[Question]:
    """All rows of a dataset, as it stands in `fields` (the first of them that is a column): a text, or a list of turns.

    `path`, if given, is read instead of the Hub's `id`: JSON lines (also .gz), JSON, Parquet, CSV, or a folder that
    `Dataset.save_to_disk` wrote. `kind` names a column, else it is the kind of all rows.
    """
    rows = loaded(f"prompts.id={id}", id, name, split) if path is None else local(path, split)
    where = path or id
    field = next((field for field in fields if field in rows.column_names), None)
    if field is None:
        raise UserError(f"{where} has no column {' or '.join(fields)}: it has {', '.join(rows.column_names)}")
    questions = []
    for number, row in enumerate(rows):
        turns = row[field] if isinstance(row[field], list) else [row[field]]
        own = {"id": number, "kind": kind if row.get(kind) is None else str(row[kind]), "turns": turns}
        questions.append(question(own, f"{where} row {number}", number))
    return distinct(questions, where)


def local(path: str, split: str) -> Any:
    """The rows of a file or of a folder. Raises UserError for what cannot be read."""
    import datasets

    place = Path(path)
    if not place.exists():
        raise UserError(f"prompts.path={path} is missing: give a file in the set's own format, or null to ask the Hub")
    if place.is_dir():
        try:
            saved = datasets.load_from_disk(path)
        except FileNotFoundError:
            raise UserError(f"prompts.path={path} is no folder that datasets' save_to_disk wrote") from None
        return saved if isinstance(saved, datasets.Dataset) else _split(saved, split, path)
    suffix = place.suffixes[-2] if place.suffix == ".gz" and len(place.suffixes) > 1 else place.suffix
    if suffix not in READERS:
        raise UserError(f"prompts.path={path}: use a file that ends in {', '.join(READERS)} (or .gz after it)")
    return loaded(f"prompts.path={path}", READERS[suffix], None, "train", data_files=path)


def _split(saved: Any, split: str, path: str) -> Any:
    if split not in saved:
        raise UserError(f"prompts.split={split} is not in {path}: it has {', '.join(saved)}")
    return saved[split]
