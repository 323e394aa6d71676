"""The parts of a benchmark: chosen on the command line, measured one by one, printed, written."""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from figures import write
from paceline.measure.this_machine import facts
from readme import Part, fill, under_title

Measure = Callable[[bool], dict[str, Any]]
_QUICK, _FILL = "--quick", "--fill"


def run_parts(folder: Path, parts: Mapping[str, Part]) -> None:
    """Measure parts as `run` does; their tables stand under their titles."""
    run(folder, {name: part.measure for name, part in parts.items()}, partial(under_title, parts))


def run(folder: Path, parts: Mapping[str, Measure], text: Callable[[str, Any], str]) -> None:
    """Measure the parts that the command line names, or all, and write result.json after each.

    A part is told whether to be quick; `text` returns the tables of its figures, to be printed.
    The figures of quick parts mean nothing, and are not written. Parts that are not named keep what
    they had, and the machine that they were measured on. With --fill nothing is measured, and the
    tables of result.json are put into README.md.
    """
    if _FILL in sys.argv:
        fill(folder, ("result.json",), text)
        return
    quick = _QUICK in sys.argv
    names = [name for name in sys.argv[1:] if name != _QUICK] or list(parts)
    unknown = [name for name in names if name not in parts]
    if unknown:
        sys.exit(f"no part is called {unknown[0]!r}; known: {', '.join(parts)}")
    for name in names:
        figures = parts[name](quick)
        if not quick:
            earlier, others = _earlier(folder, name)
            write(folder, _ordered(earlier | {name: figures}, parts), others)
        print(f"\n{text(name, figures)}", flush=True)


def _ordered(figures: Mapping[str, Any], parts: Mapping[str, Measure]) -> dict[str, Any]:
    """Return the figures in the order of the parts, whichever was measured last."""
    places = {name: place for place, name in enumerate(parts)}
    return dict(sorted(figures.items(), key=lambda item: places.get(item[0], len(places))))


def _earlier(folder: Path, but: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of the other parts that were measured before, and their other machines."""
    path = folder / "result.json"
    if not path.exists():
        return {}, {}
    content = json.loads(path.read_text())
    figures = {name: own for name, own in content["figures"].items() if name != but}
    machines = dict.fromkeys(figures, content["machine"]) | content.get("other_machines", {})
    here = facts(torch.device("cpu"))
    return figures, {name: machines[name] for name in figures if machines[name] != here}
