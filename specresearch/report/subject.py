"""A run as the report names it: its parts by their options, what sets it apart from others, the command that made it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specresearch import commands
from specresearch.comparison.bootstrap import Bootstrap, Estimate
from specresearch.comparison.units import speedup, timings
from specresearch.console import number
from specresearch.metrics import Line
from specresearch.report.tally import Tally, tally
from specresearch.results import Results

CONF = Path(__file__).resolve().parents[1] / "conf"
FIRST = ("drafter", "tree", "verifier", "target")  # in a name
ASIDE = {"resume", "report", "tracker", "profile", "objective", "lossy"}  # what changes none of a run's numbers


@dataclass(frozen=True)
class Subject:
    """One run among those of a report."""

    name: str
    place: int  # 0, 1, ... in the order given
    results: Results
    tally: Tally

    @property
    def summary(self) -> dict[str, Any]:
        return self.results.summary

    @property
    def lines(self) -> list[Line]:
        return self.results.lines

    @property
    def gain(self) -> Estimate:
        """The speedup over plain decoding, with its 95% interval over questions."""
        return Bootstrap(10_000, 0.95, 0).estimate(speedup(timings(self.results, self.results.by_question())))

    @property
    def css(self) -> str:
        """Its colour, and after eight runs another dash."""
        return f"s{self.place % 8} w{self.place // 8 % 3}"


def within(x: Estimate, before: str = " ") -> str:
    """Its interval with what stands before it, or nothing where there is none."""
    return "" if x.low is None else f"{before}[{number(x.low)}, {number(x.high)}]"


def subjects(results: Sequence[Results]) -> list[Subject]:
    return [Subject(name, i, each, tally(each.lines)) for i, (name, each) in enumerate(zip(names(results), results))]


def names(results: Sequence[Results]) -> list[str]:
    """What varies between the runs; the folder too, where that leaves two of them alike."""
    configs = [flat(each.summary.get("config") or {}) for each in results]
    labels = [" ".join(_differing(config, configs)) for config in configs]
    return [
        label if label and labels.count(label) == 1 else f"{label} {each.folder.name}".strip()
        for label, each in zip(labels, results)
    ]


def _differing(config: dict[str, str], configs: Sequence[dict[str, str]]) -> list[str]:
    """A part's own keys are compared only among runs that chose the same part: `drafter=eagle` says the rest."""
    found = []
    for key, value in sorted(config.items(), key=lambda item: _rank(item[0])):
        group = key.split(".")[0]
        peers = [other for other in configs if key == group or other.get(group) == config.get(group)]
        if group not in ASIDE and any(other.get(key) != value for other in peers):
            found.append(f"{key}={value}")
    return found


def _rank(key: str) -> int:
    group = key.split(".")[0]
    return FIRST.index(group) if group in FIRST else len(FIRST)


def flat(config: dict[str, Any]) -> dict[str, str]:
    """{"drafter": "eagle", "tree.topk": "4", "seed": "0", ...}: a part is named by its option."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and "_target_" in value:
            found[key] = option(key, value)
            found |= {f"{key}.{name}": str(own) for name, own in value.items() if name != "_target_"}
        else:
            found[key] = str(value)
    return found


def option(group: str, node: Any) -> str:
    """The option that makes this part, by its `_target_`; a part from elsewhere keeps its class's name."""
    target = str(node.get("_target_", "")) if isinstance(node, dict) else ""
    return _options(group).get(target) or target.rpartition(".")[2] or "-"


@functools.cache
def _options(group: str) -> dict[str, str]:
    files = sorted((CONF / group).glob("*.yaml"), reverse=True)
    nodes = ((path.stem, yaml.safe_load(path.read_text(encoding="utf-8"))) for path in files)
    return {str(node["_target_"]): stem for stem, node in nodes if isinstance(node, dict) and "_target_" in node}


def command(results: Results) -> str:
    """The command line that makes this run again; a sweep's job is named by its own overrides."""
    own = results.folder / ".hydra" / "overrides.yaml"
    argv = [str(word) for word in (results.summary.get("provenance") or {}).get("argv", ["specresearch"])]
    given = commands.noted(results.folder) if own.exists() else [a for a in argv[1:] if not a.startswith("hydra.")]
    return commands.line([word for word in given if not word.startswith("resume=")])
