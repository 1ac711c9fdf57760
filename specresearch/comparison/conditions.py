"""May these runs be compared? What they must share, what differs in how they were measured, and what varies between them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from specresearch import commands
from specresearch.comparison.units import Id
from specresearch.overrides import CONF
from specresearch.results import Results
from specresearch.types import UserError

SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "max_new_tokens",
    "grammar",
)
CONDITIONS = ("prompts", "target", "dtype", *SETTINGS)  # what `allow=` takes
PLACEMENT = ("device", "device_map", "dtype", "wheel")  # keys of a target that do not change which model it is
# Keys that say how a run is shown and checked, not what it does; `limit` is seen in the prompts.
ASIDE = ("resume", "tracker", "objective", "profile", "report", "check", "baseline", "limit", "log", "lossy")
Config = Mapping[str, Any]


def questions(runs: Sequence[Results], allow: Collection[str]) -> list[Id]:
    """The questions that all runs have answered. Raises UserError where runs differ in what `allow` does not name."""
    if odd := [name for name in allow if name not in CONDITIONS]:
        raise UserError(f"allow={odd[0]} is unknown: use some of [{','.join(CONDITIONS)}]")
    for run in runs:
        if not run.lines:
            raise UserError(f"{run.folder} has no finished block of answers: {resume(run)}, or leave it out")
    for other in runs[1:]:
        _refuse(runs[0], other, allow)
    asked = [_prompts(run, tokens="target" not in allow) for run in runs]
    shared = [id for id in asked[0] if all(each.get(id) == asked[0][id] for each in asked[1:])]
    for (one, left), (other, right) in combinations(zip(runs, asked), 2):
        if "prompts" not in allow and not _same(left, right, one, other):
            raise UserError(_other_prompts(one, other, left, right, len(shared)))
    if not shared:
        raise UserError("these runs have no question in common: run them on the same prompts, with the same limit")
    return shared


def resume(run: Results) -> str:
    return f"go on with  {commands.go_on(run.folder)}"


def _refuse(one: Results, other: Results, allow: Collection[str]) -> None:
    left, right = identity(one), identity(other)
    odd = [name for name in left if left[name] != right[name] and name not in allow]
    if odd:
        said = ", ".join(f"{name} ({short(left[name])} and {short(right[name])})" for name in odd)
        raise UserError(
            f"{one.folder} and {other.folder} differ in {said}: compare runs that are alike in this, or say "
            f"allow=[{','.join(odd)}] if that is what you study"
        )


def identity(run: Results) -> dict[str, Any]:
    """What must be alike for accepted lengths and speeds to mean the same."""
    config, device = run.summary["config"], run.summary["provenance"].get("device") or {}
    target = {key: value for key, value in (config.get("target") or {}).items() if key not in PLACEMENT}
    settings = {key: config.get(key) for key in SETTINGS}
    grammar = {key: value for key, value in (config.get("grammar") or {}).items() if key != "draft"}
    settings["grammar"] = grammar if len(grammar) > 1 else None  # grammar=none, or a run from before there were any
    return {"target": target, "dtype": device.get("dtype")} | settings


def _prompts(run: Results, tokens: bool) -> dict[Id, Any]:
    """Later turns hold the run's own answers: the first one tells whether the question is the same."""
    return {id: lines[0]["prompt_ids"] if tokens else lines[0]["kind"] for id, lines in run.by_question().items()}


def _same(left: Mapping[Id, Any], right: Mapping[Id, Any], one: Results, other: Results) -> bool:
    """An interrupted run may lack questions."""
    alike = all(left[id] == right[id] for id in left.keys() & right.keys())
    whole = [asked for asked, run in ((left, one), (right, other)) if not run.summary["interrupted"]]
    return alike and all((left.keys() | right.keys()) <= asked.keys() for asked in whole)


def _other_prompts(one: Results, other: Results, left: Mapping, right: Mapping, shared: int) -> str:
    told = f"{one.folder} and {other.folder} were asked other prompts"
    if changed := [id for id in left if id in right and left[id] != right[id]]:
        more = f" and {len(changed) - 1} more have" if len(changed) > 1 else " has"
        return f"{told}: question {changed[0]}{more} other tokens: use the same prompts and chat template"
    both = len(left.keys() & right.keys())
    way = f", or say allow=prompts to compare them on the {shared} that all runs share" if shared else ""
    return f"{told} ({len(left)} and {len(right)} questions, {both} in both): use the same prompts and limit{way}"


def warnings(runs: Sequence[Results], shared: int) -> list[str]:
    """What weakens the comparison without forbidding it."""
    said = []
    for number, run in enumerate(runs, 1):
        if run.summary["interrupted"]:
            said.append(f"run {number} was interrupted, all are compared on {shared} questions; {resume(run)}")
    where = [run.summary["provenance"] for run in runs]
    machines = {f"{p['device']['name']}, {p['device']['kind']}, {p['device']['threads']} threads": 0 for p in where}
    if len(machines) > 1:
        said.append(f"runs of different machines ({'; '.join(machines)}): their speeds are not comparable")
    packages = sorted({name for p in where for name in p["versions"]})
    moved = [name for name in packages if len({p["versions"].get(name) for p in where}) > 1]
    if moved:
        said.append(f"runs of different versions of {', '.join(moved)}: their speeds are not comparable")
    if len({(p["git"] or {}).get("sha") for p in where}) > 1:
        said.append("runs of different commits of the source: their speeds are not comparable")
    return said


# -- what varies -------------------------------------------------------------------------------------------------------------


def varying(runs: Sequence[Results]) -> dict[str, list[str]]:
    """The keys whose values differ among the runs that have them -> each run's value, "" where it has no such key."""
    flat = [dict(_leaves(run.summary["config"])) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    columns = {key: [each.get(key, "") for each in flat] for key in keys}
    return {key: values for key, values in columns.items() if len({*values} - {""}) > 1}


def _leaves(config: Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A group is named by its option, its keys by `group.key`."""
    for key, value in config.items():
        if not prefix and key in ASIDE:
            continue
        if isinstance(value, dict) and "_target_" in value:
            yield key, option(key, value["_target_"])
        if isinstance(value, dict) and value:
            yield from _leaves({k: v for k, v in value.items() if k != "_target_"}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", short(value)


@cache
def option(group: str, target: str) -> str:
    """The name of the yaml that names this class; the class itself for one from elsewhere."""
    for path in sorted((Path(CONF) / group).glob("*.yaml")):
        if (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("_target_") == target:
            return path.stem
    return target.rpartition(".")[2]


def short(value: Any) -> str:
    """As on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
