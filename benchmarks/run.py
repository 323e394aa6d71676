"""Measure parts of a benchmark, print their tables, and write the figures to result.json.

    python benchmarks/run.py FOLDER [PART...] [--quick] [--fill]

Without PART, all parts are measured. Other parts keep their figures in result.json, with the facts
of their machine. --quick runs a few steps to check that everything works, and writes nothing.
--fill measures nothing: it writes the tables of result.json into README.md, and files of `FILES`.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"
_OWN_THREADS = ("first_minutes", "memory", "profiling", "scaling")  # not limited to one thread
Figures = dict[str, Any]


def main() -> None:
    """Measure the parts that the command line names, or fill README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", choices=sorted(one.parent.name for one in HERE.glob("*/main.py")))
    parser.add_argument("parts", nargs="*", metavar="part")
    parser.add_argument("--quick", action="store_true", help="only show that everything works")
    parser.add_argument("--fill", action="store_true", help="put the tables into README.md")
    given = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # only benchmarks/gpu uses GPUs
    if given.folder not in _OWN_THREADS:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = HERE / given.folder
    sys.path[:0] = [str(folder), str(HERE / "network")]
    found = import_module("main")
    if unknown := [name for name in given.parts if name not in found.PARTS]:
        parser.error(f"no part is called {unknown[0]!r}; known: {', '.join(found.PARTS)}")
    if given.fill:
        _fill(folder, found.PARTS, getattr(found, "FILES", {}))
    for name in () if given.fill else given.parts or found.PARTS:
        _measure(folder, found.PARTS, name, quick=given.quick)


def _measure(folder: Path, parts: Mapping[str, Any], name: str, *, quick: bool) -> None:
    from paceline.core.errors import PacelineError

    try:
        figures = parts[name].measure(quick)
    except PacelineError as problem:  # e.g. this machine cannot simulate two hosts
        sys.exit(f"{name}: {problem}")
    if not quick:
        _write(folder, parts, name, figures)
    print(f"\n{_text(parts, name, figures)}", flush=True)


def _text(parts: Mapping[str, Any], name: str, figures: Any) -> str:
    """Return the tables of a part, below its heading if it has one."""
    part = parts[name]
    text: str = part.text(figures)
    return f"## {part.title}\n\n{text}" if part.title else text


def _write(folder: Path, parts: Mapping[str, Any], name: str, figures: Any) -> None:
    """Write result.json: figures in the order of the parts, and the machine of each part."""
    import torch

    from paceline.measure.this_machine import facts

    here = facts(torch.device("cpu"))
    path = folder / "result.json"
    content = json.loads(path.read_text()) if path.exists() else {"machine": here, "figures": {}}
    known = {one: own for one, own in content["figures"].items() if one != name}
    machines = dict.fromkeys(known, content["machine"]) | content.get("other_machines", {})
    others = {one: machines[one] for one in known if machines[one] != here}
    known[name] = figures
    order = {one: place for place, one in enumerate(parts)}
    ordered = dict(sorted(known.items(), key=lambda item: order.get(item[0], len(order))))
    written = {"machine": here, "figures": ordered} | ({"other_machines": others} if others else {})
    path.write_text(json.dumps(written, indent=2) + "\n")


def _fill(folder: Path, parts: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write the tables of result.json between README.md's two marks, and the other files."""
    path = folder / "result.json"
    content = json.loads(path.read_text()) if path.exists() else {"figures": {}}
    readme = folder / "README.md"
    before, mark, rest = readme.read_text().partition(_BEGIN)
    if mark:
        after = rest.partition(_END)[2]
        readme.write_text("\n\n".join([before + _BEGIN, *_tables(parts, content), _END]) + after)
    for place, text_of in files.items():
        (HERE.parent / place).write_text(text_of(content["figures"]))


def _tables(parts: Mapping[str, Any], content: Figures) -> Iterator[str]:
    for name, figures in content["figures"].items():
        yield _text(parts, name, figures)
    yield _shown(content["machine"])
    for name, machine in content.get("other_machines", {}).items():
        yield f"{name}: {_shown(machine)}"


def _shown(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())


if __name__ == "__main__":
    main()
