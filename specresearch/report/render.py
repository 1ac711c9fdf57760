"""Templates to text: everything that is no Markup is escaped, style and script stand in the page itself."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def page(template: str, **content: Any) -> str:
    """A template's text. A name that it lacks raises."""
    return _environment().get_template(template).render(**content)


@functools.cache
def _environment() -> Environment:
    loader = PackageLoader("specresearch.report", "page")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    for name in ("style.css", "script.js"):
        found.globals[name.partition(".")[0]] = Markup(loader.get_source(found, name)[0])
    return found
