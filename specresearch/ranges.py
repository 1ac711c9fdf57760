"""What values a setting or a field of a file may have, and what to write instead of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specresearch.types import UserError


@dataclass(frozen=True)
class Rule:
    holds: Callable[[Any], bool]
    instead: str


def whole(least: int = 1, most: int = 1 << 40) -> Rule:
    above = f" and at most {most}" if most < 1 << 24 else ""
    return Rule(lambda v: type(v) is int and least <= v <= most, f"a whole number of at least {least}{above}")


def number(least: float = 0.0, most: float = math.inf, above: bool = False) -> Rule:
    """`above`: not `least` itself."""
    text = f"a number {'above' if above else 'of at least'} {least:g}" + (
        f" and at most {most:g}" if most < math.inf else ""
    )

    def holds(v: Any) -> bool:
        return type(v) in (int, float) and math.isfinite(v) and (v > least if above else v >= least) and v <= most

    return Rule(holds, text)


def several(rule: Rule, of: str) -> Rule:
    return Rule(lambda v: isinstance(v, list | tuple) and bool(v) and all(map(rule.holds, v)), f"a list of {of}")


def optional(rule: Rule) -> Rule:
    return Rule(lambda v: v is None or rule.holds(v), f"{rule.instead}, or null")


FLAG = Rule(lambda v: type(v) is bool, "true or false")
MAPPING = Rule(lambda v: isinstance(v, Mapping), "a mapping")


def require(values: Mapping[str, Any], rules: Mapping[str, Rule], prefix: str = "") -> None:
    """Raises UserError for the first of the `values` that its rule forbids; what has no rule may be anything."""
    for name, rule in rules.items():
        if name in values and not rule.holds(values[name]):
            raise UserError(f"{prefix}{name}={values[name]!r}: use {rule.instead}")
