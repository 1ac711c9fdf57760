"""What `grammar=` names: a JSON schema, a regular expression, or rules in EBNF; from a file or as it stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specresearch import console
from specresearch.grammar import limits
from specresearch.grammar.backend import Compiled, parse
from specresearch.prompts import SIGN
from specresearch.types import Target, UserError


class Source:
    """A grammar before its target is known. Whatever is wrong with it is said here, before a model is loaded."""

    def __init__(self, kind: str, text: str, options: dict[str, Any], draft: bool, said: str):
        if not isinstance(draft, bool):
            raise UserError(f"grammar.draft={draft}: use true or false")
        self.kind, self.draft = kind, draft
        self.origin = hashlib.sha256(repr((kind, text, options)).encode()).hexdigest()[:16]
        self.grammar = parse(kind, text, options, said)

    def compile(self, target: Target) -> Compiled:
        return Compiled(self.grammar, target, self.origin, self.kind, self.draft)


def none() -> None:
    """grammar=none: any text."""


def json_schema(*, schema: str | Mapping[str, Any], whitespace: int | None, draft: bool) -> Source:
    text = json.dumps(schema) if isinstance(schema, Mapping) else _read("schema", schema, lambda x: x.startswith("{"))
    try:
        wanted = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"grammar.schema={_short(schema)} is not JSON ({error.msg}): give a JSON schema") from None
    if whitespace is not None and (type(whitespace) is not int or whitespace < 0):
        raise UserError(f"grammar.whitespace={whitespace}: use a whole number from 0, or null for any number of blanks")
    options: dict[str, Any] = {"any_whitespace": whitespace != 0, "max_whitespace_cnt": whitespace or None}
    if whitespace == 0:
        options["separators"] = (",", ":")
    made = Source("json_schema", text, options, draft, f"grammar.schema={_short(schema)}")
    _say(f"grammar.schema={_short(schema)}", limits.of_schema(wanted))
    return made


def regex(*, pattern: str, draft: bool) -> Source:
    pattern = _text("pattern", pattern)
    made = Source("regex", pattern, {}, draft, f"grammar.pattern={_short(pattern)}")
    _say(f"grammar.pattern={_short(pattern)}", limits.of_pattern(pattern))
    return made


def ebnf(*, rules: str, draft: bool) -> Source:
    text = _read("rules", rules, lambda x: "::=" in x)
    return Source("ebnf", text, {}, draft, f"grammar.rules={_short(rules)}")


def _say(what: str, ignored: list[str]) -> None:
    if ignored:
        console.note(f"{what}: xgrammar does not enforce {', '.join(ignored)}; a complete answer may break it")


def _read(key: str, given: Any, stands: Callable[[str], bool]) -> str:
    """The text itself where it `stands` there, else that of the file."""
    text = _text(key, given)
    if stands(text.strip()):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"grammar.{key}={_short(text)} cannot be read: {reason}; give a file, or the {key} itself"
        ) from None


def _text(key: str, given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise UserError(f"grammar.{key}={given}: use a text")
    return given.replace(SIGN, "$")


def _short(given: Any) -> str:
    text = " ".join(str(given).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
