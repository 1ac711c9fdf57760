"""The files of a run's folder, written line by line and read back: comparisons, reports and replays need no model."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specresearch.metrics import Block, Line
from specresearch.types import UserError


@dataclass(frozen=True)
class Results:
    """What a run left behind."""

    folder: Path
    summary: dict[str, Any]  # summary.json, with `config` and `provenance`
    lines: list[Line]  # trace.jsonl: the answers of finished blocks
    blocks: list[Block]  # blocks.jsonl: times and checks, block by block
    pieces: dict[int, str]  # tokens.json: the text of every token in the trace; empty for a run that broke off

    def by_question(self) -> dict[int | str, list[Line]]:
        """The answers to each question, turn by turn, in the order in which the questions were put."""
        found: dict[int | str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line["id"], []).append(line)
        return found

    def by_block(self) -> list[tuple[Block, list[Line]]]:
        return with_answers(self.blocks, self.lines)


def with_answers(blocks: Sequence[Block], lines: Sequence[Line]) -> list[tuple[Block, list[Line]]]:
    """Each block with its answers, which stand in the trace one block after the other."""
    ends = list(itertools.accumulate(block["answers"] for block in blocks))
    return [(block, list(lines[end - block["answers"] : end])) for block, end in zip(blocks, ends)]


def read(folder: Path) -> Results:
    """Raises UserError where there is no summary.json, or a file is damaged."""
    path, named = folder / "summary.json", folder / "tokens.json"
    if not path.exists():
        raise UserError(f"{path} is missing: give the folder of a finished run")
    summary = _json(path)
    if not all(isinstance(summary.get(key), dict) for key in ("config", "lossless", "provenance")):
        raise UserError(f"{path} is no summary of a run: give the folder of a finished run")
    pieces = _json(named) if named.exists() else {}
    lines, blocks = read_finished(folder)
    if len(lines) < summary.get("prompts", 0):
        raise UserError(
            f"{folder} holds {len(lines)} of the {summary['prompts']} answers that its summary counts (blocks.jsonl has lost "
            f"some): make them again with  resume={folder}"
        )
    return Results(folder, summary, lines, blocks, {int(token): text for token, text in pieces.items()})


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: leave this run out, or go on with  resume={path.parent}")
    return found


def find(folders: Sequence[str | Path]) -> list[Results]:
    """Runs by folder, in the order given; a sweep's folder stands for its jobs. Raises UserError for one that holds none."""
    found = []
    for folder in map(Path, folders):
        below = sorted(folder.glob("*/summary.json"), key=lambda p: (len(p.parent.name), p.parent.name))
        inside = [folder] if (folder / "summary.json").exists() else [path.parent for path in below]
        if not inside:
            raise UserError(f"{folder} holds no run: give a folder with summary.json, or the folder of a sweep")
        found += [read(each) for each in inside]
    return found


def write_pieces(folder: Path, lines: Sequence[Line], text: Callable[[list[int]], str]) -> dict[int, str]:
    """The text of each token that the trace names, so that it can be read without the tokenizer."""
    ids = {token for line in lines for token in line["prompt_ids"] + line["output_ids"]}
    ids |= {token for line in lines for step in line["steps"] for token in step["tokens"] if token >= 0}
    pieces = {token: text([token]) for token in sorted(ids)}
    (folder / "tokens.json").write_text(json.dumps(pieces, ensure_ascii=False), encoding="utf-8")
    return pieces


def read_finished(folder: Path) -> tuple[list[Line], list[Block]]:
    """The complete blocks of an earlier try and the answers in them, in the order of the questions; answers of a block that
    broke off are redone."""
    blocks, lines = read_lines(folder / "blocks.jsonl"), read_lines(folder / "trace.jsonl")
    done = sum(block["answers"] for block in blocks)
    if len(lines) < done:
        raise UserError(
            f"{folder}/trace.jsonl has lost answers ({len(lines)} of {done}): delete {folder} and run it again"
        )
    return in_order(with_answers(blocks, lines[:done]))


def in_order(found: Sequence[tuple[Block, list[Line]]]) -> tuple[list[Line], list[Block]]:
    """Blocks with their answers, as ranks finished them -> all answers, all blocks."""
    unique = {block["block"]: (block, lines) for block, lines in found}
    ordered = [unique[index] for index in sorted(unique)]
    return [line for _, lines in ordered for line in lines], [block for block, _ in ordered]


def collect(folder: Path) -> None:
    """Bring the blocks that other ranks answered, each in a folder of its own, into the one trace of the run."""
    parts = sorted(folder.glob("rank-*"))
    found = [each for part in (folder, *parts) for each in _finished(part)]
    lines, blocks = in_order(found)
    write_lines(folder / "trace.jsonl", lines)
    write_lines(folder / "blocks.jsonl", blocks)
    for part in parts:
        shutil.rmtree(part)


def _finished(folder: Path) -> list[tuple[Block, list[Line]]]:
    lines, blocks = read_finished(folder)
    return with_answers(blocks, lines)


def read_lines(path: Path) -> list[Line]:
    """A last line that a crash cut short does not count. Raises UserError for a file that holds something else."""
    if not path.exists():
        return []
    lines = []
    texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text) if text.strip() else None
        except ValueError:
            if number == len(texts):
                break
            raise UserError(f"{path} line {number} is damaged: delete {path.parent} and run it again") from None
        if line is not None and not isinstance(line, dict):
            raise UserError(f"{path} line {number} is damaged: delete {path.parent} and run it again")
        lines += [line] if line else []
    return lines


def write_lines(path: Path, lines: Sequence[Line]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def append_lines(path: Path, lines: Sequence[Line]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
