"""Templates to text: everything that is no Markup is escaped, style and script stand in the page itself."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def page(template: str, **content: Any) -> str:
    environment = Environment(
        loader=PackageLoader("specresearch.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source = environment.loader
    assert source is not None
    style, script = (source.get_source(environment, name)[0] for name in ("style.css", "script.js"))
    return environment.get_template(template).render(style=style, script=script, **content)
