"""Trees to ask about: the run's own with some keys changed, all smaller ones of its kind, and the command that runs one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specresearch import commands, overrides
from specresearch.build import make
from specresearch.types import TreePolicy, UserError
from specresearch.whatif.answer import Recording

Tree = dict[str, Any]  # the configuration of a tree, or changes to it: {"tree.depth": 2}
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


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


def as_text(tree: Tree) -> str:
    return " ".join(words(tree))


def words(tree: Tree) -> list[str]:
    """["tree.depth=2", ...], without what is null."""
    values = {key.removeprefix("tree."): value for key, value in tree.items() if value is not None}
    names = {
        key: "tree" if key == "tree" else f"tree.{key}" for key in values if key not in ("_target_", "temperature")
    }
    return [f"{name}={plain(values[key])}" for key, name in names.items()]


def plain(value: Any) -> str:
    return str(value).replace(" ", "")


def command(own: Recording, change: Tree) -> str:
    """The run's own overrides with another tree."""
    dropped = ("trace.", "resume=", *(["tree=", "tree."] if "tree" in change else []))
    kept = [
        o for o in commands.noted(own.run.folder) if not o.startswith(dropped) and o.partition("=")[0] not in change
    ]
    return commands.line([*kept, *words(change)])
