"""What xgrammar reads over in silence, or with a line from its C++: answers that are complete by its grammar may break it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

IGNORED = (
    "uniqueItems",
    "not",
    "contains",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
)
ONE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames")
MANY = ("prefixItems", "anyOf", "oneOf", "allOf")
NAMED = ("properties", "patternProperties", "$defs", "definitions")


def of_schema(schema: Any) -> list[str]:
    """Keywords of a JSON schema that are not enforced, each once."""
    return list(dict.fromkeys(_loose(schema)))


def _loose(schema: Any) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    yield from (key for key in IGNORED if key in schema and schema[key] is not False)
    if "oneOf" in schema:
        yield "oneOf (as anyOf)"
    if len(schema.get("allOf") or ()) > 1:
        yield "allOf of several"
    if "$ref" in schema and len(schema.keys() - {"$ref", "$defs", "definitions", "$schema", "title", "description"}):
        yield "what stands beside $ref"
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength"}:
        yield "minLength and maxLength beside pattern"
    below = [schema.get(key) for key in ONE]
    below += [each for key in MANY if isinstance(schema.get(key), list) for each in schema[key]]
    below += [each for key in NAMED if isinstance(schema.get(key), dict) for each in schema[key].values()]
    for each in below:
        yield from _loose(each)


def of_pattern(pattern: str) -> list[str]:
    """Anchors of a regular expression in other places than its ends; the whole answer must match it anyway."""
    found, escaped, inside = [], False, False
    for at, sign in enumerate(pattern):
        anchor = sign in "^$" and not escaped and not inside
        if anchor and at != (0 if sign == "^" else len(pattern) - 1):
            found.append(f"{sign} inside the pattern")
        if not escaped:
            inside = sign == "[" or (inside and sign != "]")
        escaped = sign == "\\" and not escaped
    return list(dict.fromkeys(found))
