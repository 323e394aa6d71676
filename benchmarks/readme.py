"""Tables as a README shows them, and the README that they are put into."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"


class Part(NamedTuple):
    """What a part is called, what measures it, quickly or not, and what makes tables of it."""

    title: str
    measure: Callable[[bool], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]


def under_title(parts: Mapping[str, Part], part: str, figures: dict[str, Any]) -> str:
    """Return the tables of one of the parts, under its title."""
    return f"## {parts[part].title}\n\n{parts[part].text(figures)}"


def table(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with a title above it."""
    rows = [head, ["---"] * len(head), *lines]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def fill(folder: Path, names: Sequence[str], text: Callable[[str, Any], str]) -> None:
    """Put the tables of those of the named results that exist between README.md's two marks.

    `text` returns the tables of a part; the machine stands below those of its result.
    """
    texts = []
    for path in (folder / name for name in names):
        if path.exists():
            content = json.loads(path.read_text())
            texts += [text(part, figures) for part, figures in content["figures"].items()]
            texts.append(_shown(content["machine"]))
            others = content.get("other_machines", {})
            texts += [f"{part}: {_shown(machine)}" for part, machine in others.items()]
    if not texts:
        sys.exit(f"none of {', '.join(names)} is here; run main.py first")
    readme = folder / "README.md"
    before, _, rest = readme.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    readme.write_text("\n\n".join([before + _BEGIN, *texts, _END]) + after)
