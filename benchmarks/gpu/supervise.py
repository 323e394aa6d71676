"""Run a part in a separate process with a deadline, and summarise all parts.

At the deadline, the part and all processes that it started are killed, including those in other
sessions, which would otherwise keep the GPU busy.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from attempt import end_all
from figures import table
from paceline.links.processes import TERMINATION_S, reason

_CHILD = str(Path(__file__).with_name("part.py"))
_MOST_SAID = 10_000  # characters
_WARNING = (
    "**Simulated, or with --smoke: this shows that everything works. The figures mean nothing.**"
)


def run(path: Path, module: str, deadline_s: float, *, smoke: bool) -> bool:
    """Run a part, which writes its results to `path`; return whether it succeeded."""
    path.unlink(missing_ok=True)  # remove results of an earlier run
    print(f"\n== {path.stem}: at most {deadline_s:g} s", flush=True)
    begun = time.monotonic()
    command = [sys.executable, _CHILD, module, str(path), *(["--smoke"] if smoke else [])]
    code, said = _ended(command, deadline_s)
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    outcome = {None: "ended at its deadline", 0: "done"}.get(code, "failed")
    content |= {
        "part": path.stem,
        "command": shlex.join(sys.argv),
        "seconds": time.monotonic() - begun,
        "deadline_s": deadline_s,
        "outcome": outcome,
        "why": (content.get("why") or f"its process {reason(code)}") if code else None,
        "stderr": None if code == 0 else said[-_MOST_SAID:],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"== {path.stem}: {outcome}, {content['seconds']:.0f} s", flush=True)
    return code == 0


def _ended(command: list[str], deadline_s: float) -> tuple[int | None, str]:
    """Run part.py; return its exit code (None after the deadline) and its stderr."""
    with TemporaryDirectory() as place, TemporaryFile("w+", errors="replace") as stderr:
        environment = os.environ | {"TMPDIR": place}
        known = {"cwd": place, "env": environment, "start_new_session": True}
        process, code = subprocess.Popen(command, stderr=stderr, **known), None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(deadline_s)
            if code is None:
                process.terminate()  # the part prints its stack traces
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TERMINATION_S)
        finally:
            end_all(place)
            process.wait()
        stderr.seek(0)
        said = stderr.read()
    sys.stderr.write(said)
    return code, said


def summary(folder: Path, names: Iterable[str]) -> str:
    """Return a Markdown table of the named parts, without parts that have no file."""
    paths = [folder / f"{name}.json" for name in names]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    claims_nothing = any(one.get("simulated") or one.get("smoke") for one in found)
    places: dict[str, list[str]] = {}  # parts by machine and versions
    for one in found:
        about = one.get("machine", {}) | one.get("versions", {})
        place = ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)
        places.setdefault(place, []).append(f"{one['part']} ({one.get('date', 'no date')})")
    head = ("part", "outcome", "s", "figures")
    drawn = table("Evidence from a GPU", head, [_row(one) for one in found])
    where = [f"{', '.join(own)}: {place or 'unknown machine'}" for place, own in places.items()]
    return "\n\n".join([*([_WARNING] if claims_nothing else []), drawn, *where])


def _row(content: Mapping[str, Any]) -> tuple[str, ...]:
    figures = [f"{name}: {line}" for name, line in content.get("summary", {}).items()]
    why = [content["why"].splitlines()[0]] if content["why"] else []
    cells = "<br>".join([*figures, *why]).replace("|", "/")
    seconds = f"{content['seconds']:.0f}" if "seconds" in content else "-"  # interrupted
    return content["part"], content["outcome"], seconds, cells
