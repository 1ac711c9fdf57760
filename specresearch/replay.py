"""`python -m specresearch.replay RUN_DIR tree.topk=2`: what if the tree had been this? Told from the trace, without a model.

Exact where the run recorded `trace.dense=true`; from an ordinary trace an estimate. Plain paths first, then overrides.
Exit status: 0; 1 for an error; 130 after Ctrl-C.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from rich.text import Text

from specresearch import cli, console, overrides
from specresearch.build import make
from specresearch.results import Results, find, read, read_lines
from specresearch.types import TreePolicy, UserError
from specresearch.whatif.answer import BOUNDED, ESTIMATE, EXACT, EXPECTED, Answer, Recording, answers
from specresearch.whatif.price import Prices, by_size, prices_of

OBJECTIVES = ("tokens_per_second", "speedup", "mean_accepted_length")
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SHOWN = 12  # rows of a search
USAGE = "usage: python -m specresearch.replay RUN_DIR|TRACE... [tree.depth=.. tree.topk=.. tree.size=..] [best=true]"
MEANING = {
    EXACT: "exact: the drafter's answer is recorded at every place; true up to rounding of the drafter's numbers",
    BOUNDED: "bounded: some trees ask what the run did not; those steps go on as the known ones do, or as the bounds say",
    ESTIMATE: "estimate: an ordinary trace tells of the places where its steps began; trace.dense=true makes it exact",
    EXPECTED: "expected: the text was sampled; a run's mean scatters about this number",
}
Tree = dict[str, Any]  # the configuration of a tree


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
    given = [a for a in arguments if "=" in a]
    if odd := [a for a in arguments if a.startswith("-") and "=" not in a]:
        raise UserError(f"{odd[0]} is no option here. {USAGE}")
    if not paths:
        raise UserError(f"no run was given. {USAGE}")
    options = dict(OmegaConf.load(Path(overrides.CONF) / "replay.yaml"))
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
    if options["objective"] not in OBJECTIVES:
        raise UserError(
            f"objective={options['objective']} is unknown: {overrides.near(str(options['objective']), OBJECTIVES)}"
        )
    if options["best"] not in (None, True, False):
        raise UserError(f"best={options['best']}: use true or false")
    trees = [dict(zip(changes, values)) for values in itertools.product(*changes.values())]
    best = options["best"] if options["best"] is not None else not changes
    return Wish(paths, trees, bool(best), str(options["objective"]), options["out"])


# -- what was recorded -----------------------------------------------------------------------------------------------------


def recordings(paths: Sequence[str]) -> Iterator[Recording]:
    """A folder stands for its dense trace if it has one, a sweep's for its jobs; a file for itself."""
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path} does not exist: give a run's folder, or its trace.jsonl or dense.jsonl")
        for run in [read(path.parent)] if path.is_file() else find([path]):
            yield recording(run, path if path.is_file() else None)


def recording(run: Results, file: Path | None) -> Recording:
    if run.summary["lossless"]["verdict"] == "lossy":
        raise UserError(
            f"{run.folder} was lossy: what it emitted says nothing about another tree; use a lossless verifier"
        )
    policy = policy_of(run.summary["config"], {})
    if run.summary["config"]["temperature"] > 0 and policy.temperature is not None:
        raise UserError(
            f"{run.folder} drew its drafts: which children another tree would draw is up to chance; record a run at "
            "temperature=0, or with tree.draw=topk"
        )
    path = file or run.folder / "dense.jsonl"
    dense = path.name == "dense.jsonl" and path.exists()
    lines = read_lines(path) if dense else list(run.lines)
    if not any(len(line["output_ids"]) > 1 for line in lines):
        raise UserError(
            f"{path if dense else run.folder} holds no step to replay: answer something with a drafter first"
        )
    if not dense and not any(token >= 0 for line in lines for step in line["steps"] for token in step["tokens"][1:]):
        raise UserError(f"{run.folder} holds no drafted tree: replay a run with a drafter")
    return Recording(run, lines, policy, dense)


def policy_of(config: Mapping[str, Any], change: Tree) -> TreePolicy:
    return make(OmegaConf.create({"tree": tree_of(config, change)}), "tree")


def tree_of(config: Mapping[str, Any], change: Tree) -> Tree:
    """The run's own tree with some keys changed; `tree` itself names another kind, at that kind's defaults."""
    tree = dict(config["tree"])
    if name := change.get("tree"):
        kinds = overrides.known()[1]["tree"]
        if name not in kinds:
            raise UserError(f"tree={name} does not exist: {overrides.near(str(name), kinds)}")
        node = OmegaConf.create({**config, "tree": OmegaConf.load(Path(overrides.CONF) / "tree" / f"{name}.yaml")})
        assert isinstance(node, DictConfig)
        resolved: Any = OmegaConf.to_container(node, resolve=True)
        tree = resolved["tree"]
    for key, value in change.items():
        if key == "tree":
            continue
        short = key.removeprefix("tree.")
        if short not in tree or short == "_target_":
            raise UserError(f"there is no key {key}: {overrides.near(short, [k for k in tree if k != '_target_'])}")
        tree[short] = value
        if short in ("widths", "parents") and value is not None:
            tree |= {other: None for other in ("widths", "parents") if other in tree and other != short}
    return tree


# -- questions and answers -------------------------------------------------------------------------------------------------


def search(own: Recording, change: Tree) -> Iterator[Tree]:
    """All smaller trees of this kind, those the trace can tell of and the clock can price."""
    tree = tree_of(own.run.summary["config"], change)
    priced = max((int(n) for n in (own.run.summary.get("costs") or {}).get("target", {})), default=0)
    largest = max(own.policy.size, priced if own.dense else 0)
    ranges = {
        "depth": range(1, own.policy.depth + 1),
        "topk": range(1, own.policy.width + 1),
        "size": sorted({n for n in (*SIZES, own.policy.size) if n <= largest}),
    }
    free = [key for key in ranges if key in tree and f"tree.{key}" not in change]
    for values in itertools.product(*(ranges[key] for key in free)):
        yield change | {f"tree.{key}": value for key, value in zip(free, values)}


def fitting(own: Recording, changes: Sequence[Tree]) -> Iterator[tuple[Tree, TreePolicy]]:
    """Those of a search that are trees, without those that say the same as another."""
    seen = set()
    for change in changes:
        try:
            policy = policy_of(own.run.summary["config"], change)
        except UserError:
            continue
        shape = (policy.depth, policy.width, policy.size)
        if policy.size == change.get("tree.size", policy.size) and shape not in seen:
            seen.add(shape)
            yield change, policy


def replay(own: Recording, wish: Wish) -> list[tuple[Tree, Answer]]:
    config = own.run.summary["config"]
    if wish.best:
        asked = list(fitting(own, [tree for change in wish.trees for tree in search(own, change)]))
    else:
        asked = [(change, policy_of(config, change)) for change in wish.trees]
    if not asked:
        raise UserError("no tree is left to try: give fewer of tree.depth, tree.topk, tree.size")
    prices = prices_of(own.run, own.policy.depth, own.policy.size)
    policies = [policy for _, policy in asked]
    for policy in policies:
        if policy.temperature is not None:
            raise UserError("a tree that draws its children cannot be replayed: use tree.draw=topk")
        if prices is not None:
            policy.prepare(partial(by_size, prices.target))
    with console.progress() as bar:
        task = bar.add_task("replaying", total=len(own.lines), note=f"{len(asked)} trees")
        found = answers(own, policies, prices, lambda: bar.update(task, advance=1))
    return [(change, answer) for (change, _), answer in zip(asked, found)]


def best_of(found: Sequence[tuple[Tree, Answer]], objective: str) -> tuple[Tree, Answer]:
    if all(getattr(answer, objective) is None for _, answer in found):
        raise UserError(f"the run has no clock to tell {objective} by: use objective=mean_accepted_length")
    return max(found, key=lambda one: getattr(one[1], objective) or 0.0)


# -- what is printed -------------------------------------------------------------------------------------------------------


def show(own: Recording, found: Sequence[tuple[Tree, Answer]], wish: Wish) -> None:
    summary, prices = own.run.summary, prices_of(own.run, own.policy.depth, own.policy.size)
    console.out.print(
        f"[bold]{own.run.folder}[/]  {'dense trace' if own.dense else 'ordinary trace'}, {len(own.lines)} answers"
    )
    measured = f"{console.number(summary['mean_accepted_length'])} tokens per target pass"
    speed = f"{console.number(summary['tokens_per_second'], 1)} tokens/s, {console.number(summary['speedup'])}x"
    console.out.print(
        f"measured there   {measured}, {speed}   {as_text(own.run.summary['config']['tree'])}\n", markup=False
    )
    ranked = sorted(found, key=lambda one: -(getattr(one[1], wish.objective) or 0.0)) if wish.best else list(found)
    if len(ranked) == 1:
        details(*ranked[0])
    else:
        console.wide().print(table(ranked[:SHOWN]))
    console.out.print(caption([answer for _, answer in found], prices), markup=False)
    if len(ranked) > 1:
        change, _ = best_of(found, wish.objective)
        console.out.print(f"\nbest of {len(found)} by {wish.objective}, in a run of its own:", markup=False)
        console.out.print(f"  {command(own, change)}", markup=False)


def details(change: Tree, answer: Answer) -> None:
    length = f"{console.number(answer.mean_accepted_length, 3)} tokens per target pass   {how_well(answer)}"
    histogram = console.bars({k: n for k, n in answer.histogram.items() if n > 0})  # type: ignore[arg-type]
    kinds = "   ".join(f"{kind} {console.number(own)}" for kind, own in answer.by_kind.items())
    speed = f"{console.number(answer.tokens_per_second, 1)} tokens/s   speedup {console.number(answer.speedup)}x"
    rows = {"tree": as_text(change) or "the run's own", "accepted length": length, "its histogram": histogram}
    grid = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in (rows | {"by kind": kinds, "predicted speed": speed}).items():
        grid.add_row(Text(label, style="bold"), Text(value))
    console.out.print(grid)


def table(found: Sequence[tuple[Tree, Answer]]) -> Table:
    keys = list(dict.fromkeys(key for change, _ in found for key in change))
    out = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (*keys, "accepted length", "tokens/s", "speedup", "known"):
        out.add_column(heading, justify="left" if heading == "known" else "right")
    for change, answer in found:
        numbers = (console.number(answer.mean_accepted_length, 3), console.number(answer.tokens_per_second, 1))
        cells = [str(change.get(key, "")) for key in keys]
        out.add_row(*cells, *numbers, f"{console.number(answer.speedup)}x", how_well(answer))
    return out


def how_well(answer: Answer) -> str:
    if answer.kind in (EXACT, EXPECTED):
        return answer.kind
    bounds = f"between {console.number(answer.lowest)} and {console.number(answer.highest)}"
    return f"{answer.kind}: {answer.unknown or 0:.0%} of the steps unknown, {bounds}"


def caption(found: Sequence[Answer], prices: Prices | None) -> str:
    lines = [MEANING[kind] for kind in MEANING if kind in {answer.kind for answer in found}]
    if ties := max(answer.ties for answer in found):
        lines.append(f"at {ties} places the drafter ranked two tokens equal; a run may order them otherwise")
    lines.append(
        f"costs: {prices.source}; drafting in proportion to tree.depth" if prices else "costs: none were measured"
    )
    return "\n".join(lines)


def as_text(tree: Tree) -> str:
    values = {
        key.removeprefix("tree."): value for key, value in tree.items() if value is not None and key != "_target_"
    }
    return " ".join(f"{'tree' if key == 'tree' else f'tree.{key}'}={plain(value)}" for key, value in values.items())


def plain(value: Any) -> str:
    return str(value).replace(" ", "")


def command(own: Recording, change: Tree) -> str:
    """The run's own overrides with another tree."""
    path = own.run.folder / ".hydra" / "overrides.yaml"
    given = [str(o) for o in overrides.read_yaml(path)] if path.exists() else []
    dropped = ("trace.", "resume=", "hydra.", *(["tree=", "tree."] if "tree" in change else []))
    kept = [o for o in given if not o.startswith(dropped) and o.partition("=")[0] not in change]
    return " ".join(["python -m specresearch", *map(shlex.quote, kept), as_text(change)])


def answer_all(arguments: Sequence[str]) -> None:
    wish = wish_of(arguments)
    report = []
    for number, own in enumerate(recordings(wish.paths)):
        found = replay(own, wish)
        if number:
            console.out.print()
        show(own, found, wish)
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
