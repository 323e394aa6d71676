"""Render an HTML page from its template, and format settings and facts for it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel
from pydantic_core import to_json

from paceline.links.files import write_text
from paceline.report import advice
from paceline.report.format import change_text, counted, duration, nbytes, share


@dataclass(frozen=True)
class Page:
    """An HTML page: the title, the file name of the template, and the template's variables."""

    title: str
    template: str
    content: Mapping[str, Any]


def write_page(path: Path, page: Page) -> None:
    """Write a page as one file with all scripts and styles, which loads nothing else."""
    template = _environment().get_template(page.template)
    write_text(path, template.render(title=page.title, **page.content))


@cache
def _environment() -> Environment:
    """Return the Jinja environment, which escapes texts and rejects unknown variables."""
    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (counted, duration, nbytes, share)
    environment.filters |= {function.__name__: function for function in shown}
    environment.filters |= {"change": change_text, "with_time": _with_time}
    environment.filters["advice"] = advice.shown
    environment.policies["json.dumps_function"] = _json
    plotly = files("paceline.report").joinpath("plotly-basic.min.js")
    environment.globals["plotly_js"] = lambda: Markup(plotly.read_text("utf-8"))  # noqa: S704
    return environment


def _with_time(run_id: str) -> str:
    """Format an id as "Run ID", followed by the id's date, if any: ", 2026-11-29 20:13:32"."""
    shown = f"Run {run_id}"
    with suppress(ValueError):
        shown += datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").strftime(", %Y-%m-%d %H:%M:%S")
    return shown


def _json(figure: Any, **_: object) -> str:
    return to_json(figure, inf_nan_mode="null").decode()  # JSON has neither nan nor infinity


def facts(
    settings: BaseModel, machine: Mapping[str, Any], peaks: Sequence[int] | None = None
) -> dict[str, list[tuple[str, str]]]:
    """Return two lists of names and formatted values: "Settings" and "Machine and versions".

    Settings without a value are left out. `peaks`: peak memory of each worker in bytes, which is
    added to the facts of `machine`.
    """
    known = dict(machine)
    if peaks is not None:
        unbroken = (nbytes(peak).replace(" ", "\N{NO-BREAK SPACE}") for peak in peaks)
        known["peak memory of each worker"] = ", ".join(unbroken)
    named = settings.model_dump(mode="json").items()
    given = {name: value for name, value in named if value not in (None, {}, [])}
    return {"Settings": readable(given), "Machine and versions": readable(known)}


def readable(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as readable text.

    A number whose name ends in `_bytes` or `_s` gets a unit, and its name loses the ending.
    """
    rows = []
    for name, value in values.items():
        shown, text = name, _text(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            for ending, written in (("_bytes", nbytes), ("_s", duration)):
                if name.endswith(ending):
                    shown, text = name.removesuffix(ending), written(value)
        rows.append((shown.replace("_", " "), text))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_text(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
