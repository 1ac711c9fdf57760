"""The preset of a search: what it was made under, and the tree that it found, as an experiment of Hydra's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from specresearch import commands
from specresearch.overrides import CONF
from specresearch.tuning.choose import Choice

OWN = (
    "objective",
    "confirm",
    "out",
    "depth",
    "topk",
    "size",
    "resume",
)  # keys of conf/tune.yaml that a run does not have
GROUPS = ("drafter", "verifier", "target", "grammar", "kernels")  # prompts and limit say what is asked, not how
SEARCH = "# search: "


@dataclass(frozen=True)
class Asked:
    """What the command line chose: options by group, overrides that a run takes as well, folders searched for options."""

    choices: Mapping[str, Any]
    given: Sequence[str]
    places: Sequence[str] = ()


def write(cfg: DictConfig, chosen: Choice, choices: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """OUT/experiment/tuned-DRAFTER-TARGET.yaml, numbered where that name is another search's -> its path, and the file that
    has the name. `out=null` is conf/ below the working directory: the project's own in a checkout, and a folder of the
    user's where the package is installed, since what pip put somewhere is not for writing."""
    home = Path(cfg.out or "conf") / "experiment"
    home.mkdir(parents=True, exist_ok=True)
    name, keys = f"tuned-{choices['drafter']}-{choices['target']}", conditions(cfg, choices)
    search = SEARCH + made_by(cfg, choices)
    head = (
        f"# @package _global_\n# By python -m specresearch.tune, {datetime.now():%Y-%m-%d}: predicted {chosen.speedup:.2f}x of "
        f"plain decoding, measured {chosen.ran_speedup:.2f}x ({chosen.gap or 0:+.1%}), on this machine and its prompts.\n"
    )
    first = home / f"{name}.yaml"
    names = (home / f"{name}-{number}.yaml" if number > 1 else first for number in count(1))
    path = next(one for one in names if not one.exists() or _same(one, keys, search))
    text = yaml.safe_dump(keys | {"tree": chosen.tree}, sort_keys=False)
    path.write_text(f"{head}{search}\n{text}", encoding="utf-8")
    return path, None if path == first else first


def conditions(cfg: DictConfig, choices: Mapping[str, Any]) -> dict[str, Any]:
    """All that changes an answer or its speed. A group is its option and what differs from it: another goes on top."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    defaults = [{f"override /{group}": choices[group]} for group in GROUPS] + [{"override /tree": "dynamic"}]
    root = {k: v for k, v in values.items() if k not in (*OWN, *GROUPS, "prompts", "limit")}
    own = {group: changed(group, choices[group], values.get(group) or {}) for group in GROUPS}
    return {"defaults": defaults} | root | {group: keys for group, keys in own.items() if keys}


def changed(group: str, option: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What is not as the file of the option has it; of an option from elsewhere, all."""
    path = Path(CONF) / group / f"{option}.yaml"
    before = (
        (yaml.safe_load(path.read_text(encoding="utf-8")) or {})
        if path.exists()
        else {"_target_": values.get("_target_")}
    )
    return {key: value for key, value in values.items() if key not in before or before[key] != value}


def made_by(cfg: DictConfig, choices: Mapping[str, Any]) -> str:
    """The rest of what tells one search from another, as JSON: a comment in the preset."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    own = {key: values[key] for key in ("objective", "depth", "topk", "size", "limit")}
    return json.dumps(own | {"prompts": choices["prompts"]} | changed("prompts", choices["prompts"], values["prompts"]))


def _same(path: Path, keys: Mapping[str, Any], search: str) -> bool:
    """Whether this is the preset of the same search, but for the tree."""
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return False
    plain = yaml.safe_load(yaml.safe_dump(dict(keys)))
    return (
        search in text.splitlines() and isinstance(found, dict) and {**found, "tree": None} == {**plain, "tree": None}
    )


def command(path: Path, places: Sequence[str] = ()) -> str:
    """The command that runs with a preset, from any working directory. `places` = folders that the search found options in."""
    known = path.resolve().parent == (Path(CONF) / "experiment").resolve()
    searched = [*places, *([] if known else [f"file://{path.resolve().parents[1]}"])]
    words = ",".join(
        one if re.fullmatch(r"[\w./:-]+", one) else commands.quoted(one) for one in dict.fromkeys(searched)
    )
    return commands.line([f"experiment={path.stem}", *([f"{commands.SEARCH}[{words}]"] if words else [])])
