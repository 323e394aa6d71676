"""The table of all parts whose files lie in a folder: how they ended, how long, and what of it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from readme import table

_WARNING = (
    "**Simulated, or with --smoke: this shows that everything works. The figures mean nothing.**"
)


def text(folder: Path, names: Iterable[str]) -> str:
    """Return a summary of the named parts, in Markdown; parts without a file are left out."""
    paths = [folder / f"{name}.json" for name in names]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    head = ("part", "outcome", "s", "figures")
    claims_nothing = any(one.get("simulated") or one.get("smoke") for one in found)
    lines = [_WARNING] if claims_nothing else []
    lines.append(table("Evidence from a GPU", head, [_row(one) for one in found]))
    return "\n\n".join([*lines, *_places(found)])


def _row(content: Mapping[str, Any]) -> tuple[str, ...]:
    figures = [f"{name}: {line}" for name, line in content.get("summary", {}).items()]
    why = [content["why"].splitlines()[0]] if content["why"] else []
    cells = "<br>".join([*figures, *why]).replace("|", "/")
    seconds = f"{content['seconds']:.0f}" if "seconds" in content else "-"  # it was interrupted
    return content["part"], content["outcome"], seconds, cells


def _places(found: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Say once of each machine, with its versions, which parts were measured on it, and when."""
    places: dict[str, list[str]] = {}
    for one in found:
        about = one.get("machine", {}) | one.get("versions", {})
        place = ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)
        places.setdefault(place, []).append(f"{one['part']} ({one.get('date', 'no date')})")
    for place, parts in places.items():
        yield f"{', '.join(parts)}: {place or 'nothing is known of the machine'}"
