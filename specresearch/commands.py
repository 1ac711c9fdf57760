"""Command lines to paste: a run's overrides as Hydra noted them, written again as a person types them into a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from specresearch.prompts import SIGN

TEXTS = ("prompts.text", "grammar.pattern")  # free text
STAND = {"grammar.schema": "{", "grammar.rules": "::="}  # free text if it has this sign, else the name of a file
SEARCH = "hydra.searchpath="


def is_text(key: str, value: str) -> bool:
    """Whether a value is taken to the letter, not as Hydra's grammar of commas, brackets and quotes."""
    return key in TEXTS or (key in STAND and STAND[key] in value)


def quoted(text: str) -> str:
    """`text` as a string of Hydra's grammar, to the letter."""
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


def unquoted(value: str) -> str:
    """The text of a string of Hydra's grammar; what has no quotes stays as it is."""
    mark = value[:1]
    if mark not in ("'", '"') or len(value) < 2 or value[-1] != mark:
        return value
    return re.sub(rf"(\\*)({mark}|$)", lambda m: "\\" * (len(m[1]) // 2) + m[2], value[1:-1])


def typed(override: str) -> str:
    """An override that went through `overrides.prepare`, as it was before: what is free text has no quotes of Hydra's."""
    key, equals, value = override.partition("=")
    text = unquoted(value).replace(SIGN, "$")
    return f"{key}={text}" if equals and is_text(key, text) else override


def start(module: str, processes: int = 1) -> list[str]:
    """How the command begins, with so many processes side by side."""
    by = ["python"] if processes == 1 else ["torchrun", f"--nproc-per-node={processes}"]
    return [*by, "-m", module]


def line(given: Sequence[str], module: str = "specresearch", processes: int = 1) -> str:
    """The command, for a shell. `given` = overrides that Hydra noted."""
    return shlex.join([*start(module, processes), *map(typed, given)])


def go_on(folder: Path, module: str = "specresearch", processes: int = 1) -> str:
    """The command that resumes what is in `folder`."""
    return line([f"resume={folder}"], module, processes)


def noted(folder: Path) -> list[str]:
    """The overrides of the run in `folder`. Of Hydra's own, noted in another file, those alone that the others need."""
    own = loaded(folder / ".hydra" / "overrides.yaml") or []
    hydra = (((loaded(folder / ".hydra" / "hydra.yaml") or {}).get("hydra") or {}).get("overrides") or {}).get("hydra")
    return [str(one) for one in own if not str(one).lstrip("+~").startswith("hydra")] + searched(hydra or [])


def searched(hydra: Sequence[Any]) -> list[str]:
    """Of Hydra's own overrides those that say where options lie: without them, one of another folder is not found."""
    return [str(one) for one in hydra if str(one).lstrip("+").startswith(SEARCH)]


def loaded(path: Path) -> Any:
    """A YAML file's content; None where it cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
