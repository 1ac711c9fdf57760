"""The command line before and after Hydra: quoting a prompt, resuming a run, explaining a mistake in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from specresearch.engine import CONF
from specresearch.types import UserError


def prepare(arguments: list[str]) -> list[str]:
    """Quote what is free text; with `resume=DIR`, put the run's own overrides in front and write into its folder."""
    flags = [a for a in arguments if a.startswith("-")]  # argparse wants them before the overrides
    if not any("=" not in a for a in arguments if not a.startswith("-")):  # ... unless one of them takes a value
        arguments = flags + [a for a in arguments if not a.startswith("-")]
    arguments = [_quoted(argument) for argument in arguments]
    resumes = [a.split("=", 1)[1].strip("'\"") for a in arguments if a.startswith("resume=")]
    if not resumes or resumes[-1] in ("", "null"):
        return arguments
    return _resumed(Path(resumes[-1]), [a for a in arguments if not a.startswith("resume=")])


def _quoted(argument: str) -> str:
    """A prompt is text, not Hydra's grammar of commas, brackets and quotes."""
    key, sep, value = argument.partition("=")
    if key not in ("prompts.text", "resume") or not sep or value == "???" or value[:1] in ("'", '"'):
        return argument
    return f"{key}='" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"


def _resumed(folder: Path, given: list[str]) -> list[str]:
    saved, own = folder / "config.yaml", folder / ".hydra" / "overrides.yaml"
    if not saved.exists() or not own.exists():
        raise UserError(f"resume={folder}: no run was started there (config.yaml is missing)")
    config: Any = OmegaConf.load(saved)
    choices = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra.runtime.choices
    for override in OverridesParser.create().parse_overrides(given):
        key = override.get_key_element()
        before = choices[key] if key in choices else OmegaConf.select(config, key)
        if key.startswith("hydra.") or before != override.value():
            raise UserError(f"resume={folder} goes on with its own settings, and there {key}={before}: leave {key} out")
    first = [o for o in OmegaConf.to_object(OmegaConf.load(own)) if not str(o).startswith("resume=")]  # type: ignore[union-attr]
    return [*map(str, first), f"resume='{folder}'", f"hydra.run.dir='{folder}'"]


def frozen(cfg: DictConfig, folder: Path) -> DictConfig:
    """The configuration of this run: saved at its start, and read back when it is resumed."""
    path = folder / "config.yaml"
    if cfg.resume:
        return OmegaConf.load(path)  # type: ignore[return-value]
    OmegaConf.save(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)), path)
    return cfg


def known() -> tuple[list[str], dict[str, list[str]]]:
    """All keys that exist somewhere in conf/, and the options of each group."""
    root, keys = Path(CONF), set(OmegaConf.load(Path(CONF) / "config.yaml")) - {"defaults"}
    options: dict[str, list[str]] = {}
    for path in sorted(root.glob("*/*.yaml")):
        group = path.parent.name
        options.setdefault(group, []).append(path.stem)
        content: Any = OmegaConf.load(path)
        keys |= {f"{group}.{key}" for key in content if key != "_target_"} | {group}
    return sorted(map(str, keys)), options


def near(word: str, choice: Sequence[str]) -> str:
    return near_text(difflib.get_close_matches(word, choice, n=3, cutoff=0.6), choice)


def near_text(close: Sequence[str], choice: Sequence[str]) -> str:
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(choice)}"


def explain(error: Exception) -> str:
    """Hydra's and OmegaConf's complaints in one line that names what is near."""
    keys, options = known()
    text, cause = str(error), error.__cause__
    while cause is not None:
        text, cause = text + "\n" + str(cause), cause.__cause__
    if found := re.search(r"Could not find '([\w./@-]+)/([^/']+)'", text):
        return f"{found[1]}={found[2]} does not exist: {near(found[2], options.get(found[1], []))}"
    if "Missing mandatory value" in text and (found := re.search(r"full_key: (\S+)", text)):
        return f"{found[1]} must be given: {found[1]}=..."
    if found := re.search(r"Could not override '([^']+)'|full_key: (\S+)", text):
        key = found[1] or found[2]
        if key not in keys:
            group = key.rpartition(".")[0]
            siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == group}
            close = difflib.get_close_matches(key.rpartition(".")[2], siblings, n=3, cutoff=0.6)
            return f"there is no key {key}: {near_text([siblings[c] for c in close], [*siblings.values()])}"
        if "not in struct" in text:
            return f"{key} is a key of another option of {key.split('.')[0]}: choose that, or leave {key} out"
    return " ".join(text.split("\n")[0].split())
