"""`python -m specresearch.replay RUN_DIR tree.topk=2`: what if the tree had been this? Told from the trace, without a model.

Exact where the run recorded `trace.dense=true`; from an ordinary trace an estimate. Plain paths first, then overrides.
Exit status: 0; 1 for an error; 130 after Ctrl-C.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from specresearch import cli, console, overrides
from specresearch.results import Results, find, read, read_lines
from specresearch.types import TreePolicy, UserError
from specresearch.whatif.answer import Answer, Recording, answers
from specresearch.whatif.candidates import Tree, fitting, policy_of, search
from specresearch.whatif.price import Prices, by_size, prices_of
from specresearch.whatif.show import show

OBJECTIVES = ("tokens_per_second", "speedup", "mean_accepted_length")
USAGE = "usage: python -m specresearch.replay RUN_DIR|TRACE... [tree.depth=.. tree.topk=.. tree.size=..] [best=true]"


@dataclass(frozen=True)
class Wish:
    """The command line: `trees` are changes to the run's own tree, one for each combination of swept values."""

    paths: list[str]
    trees: list[Tree]
    best: bool
    objective: str
    out: str | None


def wish_of(arguments: Sequence[str]) -> Wish:
    paths = [a for a in arguments if "=" not in a and not a.startswith("-")]
    if odd := [a for a in arguments if a.startswith("-")]:
        raise UserError(f"{odd[0]} is no option here. {USAGE}")
    if not paths:
        raise UserError(f"no run was given. {USAGE}")
    changes, options = overrides_of([a for a in arguments if "=" in a])
    objective, best = str(options["objective"]), options["best"]
    if objective not in OBJECTIVES:
        raise UserError(f"objective={objective} is unknown: {overrides.near(objective, OBJECTIVES)}")
    if best not in (None, True, False):
        raise UserError(f"best={best}: use true or false")
    trees = [dict(zip(changes, values)) for values in itertools.product(*changes.values())]
    return Wish(paths, trees, bool(best if best is not None else not changes), objective, options["out"])


def overrides_of(given: list[str]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Keys of the tree, each with the values that are swept; and the keys of conf/replay.yaml."""
    options: dict[str, Any] = overrides.read_yaml(Path(overrides.CONF) / "replay.yaml")
    options = {key: value for key, value in options.items() if key != "defaults"}
    changes: dict[str, list[Any]] = {}
    for override in OverridesParser.create().parse_overrides(given):
        key = override.get_key_element()
        if key == "tree" or key.startswith("tree."):
            changes[key] = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
        elif key in options:
            options[key] = override.value()
        else:
            known = overrides.near(key, [*options, "tree", "tree.depth", "tree.topk", "tree.size"])
            raise UserError(f"a replay changes the tree alone, and {key} is no key of it: {known}")
    return changes, options


# -- what was recorded -----------------------------------------------------------------------------------------------------


def recordings(paths: Sequence[str]) -> Iterator[Recording]:
    """A folder stands for its dense trace if it has one, a sweep's for its jobs; a file for itself."""
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path} does not exist: give a run's folder, or its trace.jsonl or dense.jsonl")
        if path.is_file() and path.name not in ("trace.jsonl", "dense.jsonl"):
            raise UserError(f"{path} is no trace: give a run's folder, or its trace.jsonl or dense.jsonl")
        for run in [read(path.parent)] if path.is_file() else find([path]):
            yield recording(run, path if path.is_file() else None)


def recording(run: Results, file: Path | None) -> Recording:
    if run.summary["lossless"]["verdict"] == "lossy":
        raise UserError(
            f"{run.folder} was lossy: what it emitted says nothing about another tree; use a lossless verifier"
        )
    if run.summary.get("simulated"):
        raise UserError(
            f"{run.folder} was simulated: its accepted lengths were dictated and say nothing about another tree"
        )
    policy = policy_of(run.summary["config"], {})
    if run.summary["config"]["temperature"] > 0 and policy.temperature is not None:
        raise UserError(
            f"{run.folder} drew its drafts: which children another tree would draw is up to chance; record a run at "
            "temperature=0, or with tree.draw=topk"
        )
    path = file or run.folder / "dense.jsonl"
    dense = path.name == "dense.jsonl" and path.exists()
    if adapts(policy) and not dense:
        raise UserError(f"{run.folder}: its tree took another shape in every step: record a run with tree=dynamic")
    lines = read_lines(path) if dense else list(run.lines)
    if not any(len(line["output_ids"]) > 1 for line in lines):
        raise UserError(
            f"{path if dense else run.folder} holds no step to replay: answer something with a drafter first"
        )
    if not dense and not any(token >= 0 for line in lines for step in line["steps"] for token in step["tokens"][1:]):
        raise UserError(f"{run.folder} holds no drafted tree: replay a run with a drafter")
    return Recording(run, lines, policy, dense)


def adapts(policy: TreePolicy) -> bool:
    """Whether its trees depend on what it observes, times among it, which no trace can foretell."""
    return type(policy).observe is not TreePolicy.observe


# -- questions and answers -------------------------------------------------------------------------------------------------


def replay(own: Recording, wish: Wish, prices: Prices | None) -> list[tuple[Tree, Answer]]:
    config = own.run.summary["config"]
    if wish.best:
        asked = list(fitting(own, [tree for change in wish.trees for tree in search(own, change)]))
    else:
        asked = list(possible(config, wish.trees))
    if not asked:
        raise UserError("no tree is left to try: give fewer of tree.depth, tree.topk, tree.size")
    policies = [policy for _, policy in asked]
    for policy in policies:
        if policy.temperature is not None:
            raise UserError("a tree that draws its children cannot be replayed: use tree.draw=topk")
        if adapts(policy):
            raise UserError(
                "the shape of tree=auto depends on times that are not known before: ask about tree=dynamic, e.g. with "
                "best=true, or run it"
            )
        if prices is not None:
            policy.prepare(partial(by_size, prices.target))
    with console.progress() as bar:
        task = bar.add_task("replaying", total=len(own.lines) * len(asked), note=f"{len(asked)} trees")
        found = answers(own, policies, prices, lambda: bar.update(task, advance=1))
    return [(change, answer) for (change, _), answer in zip(asked, found)]


def possible(config: dict[str, Any], changes: Sequence[Tree]) -> Iterator[tuple[Tree, TreePolicy]]:
    """The trees asked about; of many, those that cannot be are left out, and it is said."""
    for change in changes:
        try:
            yield change, policy_of(config, change)
        except UserError as error:
            if len(changes) == 1:
                raise
            console.note(f"left out: {error}")


def answer_all(arguments: Sequence[str]) -> None:
    wish = wish_of(arguments)
    report = []
    for number, own in enumerate(recordings(wish.paths)):
        prices = prices_of(own.run, own.policy.depth, own.policy.size)
        found = replay(own, wish, prices)
        if number:
            console.out.print()
        show(own, found, prices, wish.objective, wish.best)
        report += [{"run": str(own.run.folder), "tree": change, **answer.as_dict()} for change, answer in found]
    if wish.out:
        Path(wish.out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        console.out.print(f"written to  {wish.out}", markup=False)


def main() -> None:
    try:
        answer_all(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(cli.INTERRUPTED)
    except Exception as error:
        sys.exit(cli.report(error, "replay"))


if __name__ == "__main__":
    main()
