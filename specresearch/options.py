"""`python -m specresearch.options`: every drafter, tree and verifier, and which trees each verifier is lossless for.

All of it is read from conf/, the docstrings and the declarations of the classes; a new option appears by being there.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from specresearch.fit import check_fit
from specresearch.overrides import CONF
from specresearch.trees.growth import DRAWS
from specresearch.types import Drafter, TreePolicy, UserError, Verifier

GROUPS = ("drafter", "tree", "verifier")
EXAMPLES: Mapping[str, Any] = {"acceptance": [[0.6, 0.2], [0.5]]}  # for a key that must be given
MEANING = {
    "yes": "the output's law is the target's own",
    "T=0": "right at temperature 0 only",
    "lossy": "biased, runs with lossy=allow alone",
    "-": "would bias the output, and is refused",
}


def options(group: str) -> dict[str, type]:
    """The classes of a group by the name of their yaml."""
    return {path.stem: _class(_yaml(path)["_target_"]) for path in sorted((Path(CONF) / group).glob("*.yaml"))}


def _yaml(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _class(target: str) -> type:
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def description(part: type) -> str:
    """The first sentence about a part: of its file, or of its class where several share a file."""
    module = inspect.getmodule(part)
    shared = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == part.__module__]
    several = sum(issubclass(x, Drafter | TreePolicy | Verifier) for x in shared) > 1
    text = (part.__doc__ if several else None) or inspect.getdoc(module) or part.__doc__ or ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<!et al)\. ", first)[0].rstrip(".")


def trees() -> Iterator[tuple[str, str, TreePolicy]]:
    """Each tree with each way of drawing its children -> its name, its draw, the policy."""
    for name, part in options("tree").items():
        keys = {k: v for k, v in _yaml(Path(CONF) / "tree" / f"{name}.yaml").items() if k != "_target_"}
        for draw in DRAWS if "draw" in keys else [None]:
            given = keys | {"temperature": 1.0} | ({"draw": draw} if draw else {})
            yield name, draw or "", _made(part, given)


def _made(part: type, keys: dict[str, Any]) -> TreePolicy:
    try:
        return part(**keys)
    except UserError:
        return part(**keys | {k: v for k, v in EXAMPLES.items() if k in keys})


def verifiers() -> dict[str, Verifier]:
    folder = Path(CONF) / "verifier"
    return {
        name: part(**{k: v for k, v in _yaml(folder / f"{name}.yaml").items() if k != "_target_"})
        for name, part in options("verifier").items()
    }


def standing(verifier: Verifier, policy: TreePolicy) -> str:
    """One of MEANING's keys, as the check before every run decides."""
    temperature = 0.0 if verifier.greedy_only else 1.0
    try:
        check_fit(Drafter(), policy, verifier, temperature, "allow")
    except UserError:
        return "-"
    return "lossy" if verifier.lossy else "T=0" if verifier.greedy_only else "yes"


def matrix() -> Table:
    rules = verifiers()
    table = Table(title="lossless with", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("tree", "draw", "law", "growth", *rules):
        table.add_column(column)
    for name, draw, policy in trees():
        cells = [standing(rule, policy) for rule in rules.values()]
        table.add_row(name, draw, policy.law, policy.growth, *cells)
    return table


def main(console: Console | None = None) -> int:
    out = console or Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for group in GROUPS:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, part in options(group).items():
            table.add_row(f"{group}={name}", description(part))
        out.print(table)
        out.print()
    out.print(matrix())
    out.print("\n" + "   ".join(f"{word}: {meaning}" for word, meaning in MEANING.items()), soft_wrap=True)
    out.print(
        "A drafter that owns whole trees (ngram) gives points. At temperature 0 nothing is drawn: children are points, and"
        " every rule that takes points is greedy.",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
