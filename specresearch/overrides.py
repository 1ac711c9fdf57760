"""The command line before and after Hydra: quoting a prompt, resuming a run, explaining a mistake in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from specresearch import launchers
from specresearch.commands import is_text, noted, quoted
from specresearch.prompts import SIGN
from specresearch.sweeps import next_number
from specresearch.types import UserError

MULTIRUN = {"-m", "--multirun"}
# The folder of job `number` of a sweep that goes on: its number there.
OmegaConf.register_new_resolver("specresearch.number", lambda number, first: int(number) + int(first), replace=True)
CONF = str(Path(__file__).resolve().parent / "conf")


def prepare(arguments: list[str], command: str = "config") -> list[str]:
    """Quote what is free text; with `resume=DIR`, put the run's own overrides in front and write into its folder."""
    flags = [a for a in arguments if a.startswith("-")]  # argparse wants them before the overrides
    if not any("=" not in a for a in arguments if not a.startswith("-")):  # ... unless one of them takes a value
        arguments = flags + [a for a in arguments if not a.startswith("-")]
    resumes = [a.partition("=")[2] for a in arguments if a.startswith("resume=")]
    going_on: list[str] = []
    if resumes and resumes[-1] not in ("", "null"):
        rest = [a for a in arguments if not a.startswith("resume=")]
        if not MULTIRUN & set(flags):
            return _resumed(Path(resumes[-1]), rest)
        arguments, going_on = rest, _swept(Path(resumes[-1]), rest)
    if "hydra/sweeper=optuna" in arguments and not any(a.startswith(("objective=", "experiment=")) for a in arguments):
        raise UserError("hydra/sweeper=optuna searches for the highest objective: add objective=tokens_per_second")
    options = known(command)[1]
    return [_adapted(argument, options) for argument in arguments] + going_on + launchers.defaults(arguments)


def _swept(folder: Path, given: list[str]) -> list[str]:
    """With `-m ... resume=SWEEP`: jobs go into that folder, under numbers that are still free."""
    if not any(folder.glob("*/.hydra")):
        alone = (folder / ".hydra").is_dir()
        where = " is a run, no sweep: leave -m out" if alone else ": no sweep was started there"
        raise UserError(f"resume={folder}{where}")
    if moved := [a for a in given if a.startswith("hydra.sweep.")]:
        raise UserError(f"resume={folder} says where the jobs go: leave {' '.join(moved)} out")
    number = f"${{specresearch.number:${{hydra:job.num}},{next_number(folder)}}}"
    place = quoted(str(folder))
    return [f"resume={place}", f"hydra.sweep.dir={place}", f"hydra.sweep.subdir={quoted(number)}"]


def _adapted(argument: str, options: dict[str, list[str]]) -> str:
    """A prompt is text, not Hydra's grammar of commas, brackets and quotes; an empty mapping takes keys only with "+"."""
    key, equals, value = argument.partition("=")
    if equals and key in options and value in ("", "null"):
        raise UserError(f"{key}={value} is no option: there are {', '.join(options[key])}")
    if equals and is_text(key, value):
        return f"{key}={quoted(value.replace('${', SIGN + '{'))}"
    return f"+{argument}" if equals and key.split(".")[0] == "logit_bias" else argument


def _resumed(folder: Path, given: list[str]) -> list[str]:
    own = folder / ".hydra" / "overrides.yaml"
    if any(folder.glob("*/.hydra")):
        raise UserError(f"resume={folder} is a sweep: add -m and the overrides of its jobs")
    if not (folder / "config.yaml").exists() or not own.exists():
        raise UserError(f"resume={folder}: no run was started there (config.yaml or .hydra/overrides.yaml is missing)")
    config, _, hydra = (read_yaml(p) for p in (folder / "config.yaml", own, folder / ".hydra" / "hydra.yaml"))
    choices = OmegaConf.select(hydra, "hydra.runtime.choices") or {}
    if any(flag.startswith("-") for flag in given):
        raise UserError(f"resume={folder} takes no flags ({' '.join(f for f in given if f.startswith('-'))})")
    for override in OverridesParser.create().parse_overrides(given):
        key = override.get_key_element().lstrip("~+")
        before = choices[key] if key in choices else OmegaConf.select(config, key)
        if override.is_delete() or key.startswith("hydra.") or before != override.value():
            raise UserError(f"resume={folder} goes on with its own settings, and there {key}={before}: leave {key} out")
    kept = [text for text in noted(folder) if not text.startswith("resume=")]
    return [*kept, f"resume={quoted(str(folder))}", f"hydra.run.dir={quoted(str(folder))}"]


def read_yaml(path: Path) -> Any:
    try:
        return OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:80]}): start a new run") from None


def frozen(cfg: DictConfig, folder: Path) -> DictConfig:
    """The configuration of this run: saved at its start, and read back when it is resumed."""
    path = folder / "config.yaml"
    if not cfg.resume or not path.exists():
        path.write_text(yaml.safe_dump(OmegaConf.to_container(cfg, resolve=True), sort_keys=False), encoding="utf-8")
    return OmegaConf.create(yaml.safe_load(path.read_text(encoding="utf-8")))


def groups(command: str = "config") -> dict[str, str]:
    """Where each group of a command's defaults stands in its configuration, and its folder in conf/: {"tree": "tree", ...}"""
    found = {}
    for entry in OmegaConf.load(Path(CONF) / f"{command}.yaml").defaults:
        key = next(iter(entry)) if isinstance(entry, DictConfig) else ""
        folder, _, place = str(key).partition("@")
        if (Path(CONF) / folder).is_dir() and folder:
            found[place or folder] = folder
    return found


def known(command: str = "config") -> tuple[list[str], dict[str, list[str]]]:
    """All keys of a command (the name of its yaml) and of its groups, and the options of each group."""
    keys, options = set(_keys(Path(CONF) / f"{command}.yaml")) - {"defaults"}, {}
    for place, folder in groups(command).items():
        paths = sorted((Path(CONF) / folder).glob("*.yaml"))
        options[place] = [path.stem for path in paths]
        keys |= {f"{place}.{key}" for path in paths for key in _keys(path) if key != "_target_"} | {place}
    return sorted(keys), options


def _keys(path: Path) -> Iterator[str]:
    """All keys of a file, `schedule.lr` as well as `schedule`; Hydra's own are left to it."""

    def flat(node: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for key, value in node.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict) and key != "hydra":
                yield from flat(value, f"{prefix}{key}.")

    return flat(yaml.safe_load(path.read_text(encoding="utf-8")), "")


def near(word: str, choice: Sequence[str]) -> str:
    return near_text(difflib.get_close_matches(word, choice, n=3, cutoff=0.6), choice)


def near_text(close: Sequence[str], choice: Sequence[str]) -> str:
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(choice)}"


def explain(error: Exception, command: str = "config") -> str:
    """Hydra's and OmegaConf's complaints in one line that names what is near."""
    if override := getattr(error, "override", None):
        return f"{override} cannot be read as KEY=VALUE: quote it, e.g. 'key=\"a text\"' ({one_line(error)})"
    keys, options = known(command)
    text, cause = str(error), error.__cause__
    while cause is not None:
        text, cause = text + "\n" + str(cause), cause.__cause__
    if found := re.search(r"Could not find '([\w./@-]+)/([^/']+)'", text):
        group = {folder: place for place, folder in groups(command).items()}.get(found[1], found[1])
        lacking = launchers.missing(found[1], found[2])
        choice = options.get(group) or launchers.OPTIONS.get(found[1], ())
        return lacking or f"{group}={found[2]} does not exist: {near(found[2], choice)}"
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{found[1]} is a list of values: add -m to sweep over them, or give one"
    if "Missing mandatory value" in text and (found := re.search(r"full_key: (\S+)", text)):
        return f"{found[1]} must be given: {found[1]}=..."
    if found := re.search(r"Error merging override (\S+)", text):
        return f"{found[1].split('=')[0]} takes a value of another kind: see conf/{command}.yaml ({found[1]})"
    if found := re.search(r"Could not override '([^']+)'|full_key: (\S+)", text):
        key = found[1] or found[2]
        if key not in keys:
            group = key.rpartition(".")[0]
            siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == group}
            close = difflib.get_close_matches(key.rpartition(".")[2], siblings, n=3, cutoff=0.6)
            return f"there is no key {key}: {near_text([siblings[c] for c in close], [*siblings.values()])}"
        if "not in struct" in text:
            return f"{key} is a key of another option of {key.split('.')[0]}: choose that, or leave {key} out"
    return one_line(text.split("\n")[0])


def one_line(text: object) -> str:
    return " ".join(str(text).split())
