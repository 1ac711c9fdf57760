"""The data stage: dialogues of the target, by itself or on given prompts, and the check for evaluation prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specresearch import prompts, ranges
from specresearch.folders import cache_dir
from specresearch.models.hf import HFModel
from specresearch.training import dataset, origin
from specresearch.training.generate import WHY, Book, Generator, Plan, Source
from specresearch.training.openings import Opening, Sources
from specresearch.training.overlap import Overlap, fingerprint
from specresearch.training.settings import DATA
from specresearch.training.start import default_taps
from specresearch.types import Tap, UserError

ANSWER_ROOM = 64  # slots of a row for the chat template and the quoted text's instruction


def folder_of(target: HFModel, given: str | None) -> Path:
    return Path(given) if given else cache_dir() / "data" / target.name.replace("/", "--")


def evaluation() -> Overlap:
    return Overlap(turn for question in prompts.builtin() for turn in question.turns)


def make(
    target: HFModel, data: Mapping[str, Any], seed: int, progress: Callable[[Generator], None] | None = None
) -> Path:
    """Bring the folder up to `data.tokens` answer tokens -> the folder. Does nothing if they are there."""
    folder, book = folder_of(target, data["folder"]), Book(target, evaluation())
    origin.require(target, folder)
    book.catch_up(folder)
    if book.counts["answer_tokens"] < data["tokens"]:
        plan, source = _plan(data, seed), _source(data)
        generator = Generator(target, plan, book, folder, taps_of(target), source)
        generator.run(progress)
        if not book.known:
            why = ", ".join(f"{n} {WHY[name]}" for name, n in generator.refused.items()) or "there were none"
            raise UserError(f"no prompt could be used ({why}): give others, or raise data.turn_tokens")
    return folder


def require(target: HFModel, folder: Path) -> Path:
    """Raises UserError unless `folder` holds dialogues of this target."""
    if not dataset.shards(folder):
        raise UserError(
            f"data.folder={folder} holds no dialogues: name a folder that does, or make some with stage=data"
        )
    origin.require(target, folder)
    return folder


def taps_of(target: HFModel) -> tuple[Tap, ...]:
    """What every recipe finds its features in."""
    return (*default_taps(len(target.blocks)), "norm")


def _plan(data: Mapping[str, Any], seed: int) -> Plan:
    ranges.require(data, DATA, "data.")
    room = data["turn_tokens"] + data["answer_tokens"] + ANSWER_ROOM
    long = round(data["rows"] * data["long_share"]) if data["source"] == "self" else 0
    return Plan(
        tokens=data["tokens"],
        short_rows=data["rows"] - long,
        short_slots=room,
        long_rows=long,
        long_slots=room + 160,
        turn_tokens=data["turn_tokens"],
        answer_tokens=data["answer_tokens"],
        greedy=float(data["greedy"]),
        temperatures=tuple(map(float, data["temperatures"])),
        top_p=float(data["top_p"]),
        seed=seed,
        shard=48,
        features=True,
    )


def _source(data: Mapping[str, Any]) -> Source | None:
    if data["source"] == "self":
        return None
    if data["source"] == "file":
        questions = prompts.file(path=data["path"])
    else:
        questions = prompts.hf(id=data["id"], name=data["name"], split=data["split"], field=data["field"], kind=None)
    waiting = iter(questions)

    def following(chance: random.Random, sources: Sources, long: bool) -> Opening | None:
        question = next(waiting, None)
        return None if question is None else Opening(question.kind, question.turns[0], True)

    return following


def check(target: HFModel, folder: Path) -> dict[str, Any]:
    """Counts of the data, and the dialogues that share a run of words with an evaluation prompt."""
    banned, book = evaluation(), Book(target, evaluation())
    book.catch_up(require(target, folder))
    bad = [
        {"kind": d.kind, "text": text[:80]}
        for d in dataset.read_all(folder)
        if banned(text := book.text(d.tokens[d.turn :]))
    ]
    parts = [[d for d in dataset.read_all(folder) if d.held_out == held] for held in (False, True)]
    prints = [{fingerprint(book.text(d.tokens[d.turn : d.answer])) for d in part} for part in parts]
    return {
        "counts": dict(book.counts),
        "train": len(parts[0]),
        "held_out": len(parts[1]),
        "in_both": len(prints[0] & prints[1]),
        "bad": bad,
    }
