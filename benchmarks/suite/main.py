"""What the suite finds: lines of src that it runs, and mutations that make a test fail.

    python benchmarks/suite/main.py draw SRC                  # 60 mutations -> mutations.json
    python benchmarks/suite/main.py measure TREE FOLDER [ARGUMENTS OF PYTEST]
    python benchmarks/suite/main.py run TREE FOLDER OUT       # which mutations are found

TREE is a checkout with an environment of its own in .venv, with coverage installed. `measure` runs
its tests, leaves in FOLDER which test runs which line, in all processes, and prints the share of
lines by room.
`run` goes on where OUT ends.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from coverage import Coverage, CoverageData

from mutations import Mutation, Place, apply, draw, place_of

HERE = Path(__file__).parent
NUM_MUTATIONS, SEED = 60, 1
MOST_S = 420.0  # for all tests that meet one mutation; the fastest begin
GROUPS = (20, 100, 400)  # so many of the fastest tests are run before the next ones
DATA = "all"  # the combined file of coverage
Row = dict[str, object]


def main() -> None:
    """Do what the arguments ask for."""
    what, *arguments = sys.argv[1:]
    if what == "draw":
        drawn = draw(Path(arguments[0]), NUM_MUTATIONS, SEED)
        _write(HERE / "mutations.json", [asdict(one) for one in drawn])
    elif what == "measure":
        _measure(Path(arguments[0]).resolve(), Path(arguments[1]).resolve(), arguments[2:])
    else:
        _run(*(Path(one).resolve() for one in arguments))


def _measure(tree: Path, folder: Path, arguments: list[str]) -> None:
    folder.mkdir(parents=True)
    (pth,) = (tree / ".venv/lib").glob("python*/site-packages")
    (pth / "measured.pth").write_text(
        "import os; os.environ.get('PACELINE_COVERAGE') and __import__('in_all_processes')\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PACELINE_COVERAGE": str(folder)}
    (pth / "in_all_processes.py").write_text((HERE / "in_all_processes.py").read_text())
    (pth / "recorded.py").write_text((HERE / "recorded.py").read_text())
    command = [str(tree / ".venv/bin/python"), "-m", "pytest", "-p", "recorded", *arguments]
    subprocess.run(command, cwd=tree, env=environment, check=False)
    print(json.dumps(_lines(tree, folder), indent=1))


def _lines(tree: Path, folder: Path) -> dict[str, float]:
    """Combine the data of all processes; return the share of lines that were run, by room."""
    measured = Coverage(data_file=str(folder / DATA), source=[str(tree / "src")], config_file=False)
    if not (folder / DATA).exists():
        measured.combine([str(one) for one in folder.glob("data.*")], keep=True)
        measured.save()
    measured.load()
    rooms: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path in sorted((tree / "src/paceline").rglob("*.py")):
        _, lines, _, missing, _ = measured.analysis2(str(path))
        room = path.relative_to(tree / "src/paceline").parts[0]
        for name in (room, "all"):
            rooms[name][0] += len(lines) - len(missing)
            rooms[name][1] += len(lines)
    return {name: round(100 * run / max(1, lines), 2) for name, (run, lines) in rooms.items()}


def _run(tree: Path, folder: Path, out: Path) -> None:
    found: list[Row] = json.loads(out.read_text()) if out.exists() else []
    rows = json.loads((HERE / "mutations.json").read_text())
    data = CoverageData(str(folder / DATA))
    data.read()
    lines = map(json.loads, (folder / "seconds.jsonl").read_text().splitlines())
    seconds = {line[0]: line[1] for line in lines if len(line) == 2}
    for number in range(len(found), len(rows)):
        mutation = Mutation(**rows[number])
        place = place_of(mutation, tree / "src/paceline")
        if place is None:
            found.append({"number": number, "found": None})
        else:
            path = tree / "src/paceline" / mutation.file
            tests = tests_of(path, place, data, seconds)
            found.append({"number": number, **_met(path, place, tests, tree)})
        print(found[-1], flush=True)
        _write(out, found)


def tests_of(path: Path, place: Place, data: CoverageData, seconds: dict[str, float]) -> list[str]:
    """Return the tests that run the lines of a place, the fastest first.

    Lines that only imports run are those of all tests of their file.
    """
    by_line = data.contexts_by_lineno(str(path))
    lines = range(place.first_line, place.last_line + 1)
    tests = {test for line in lines for test in by_line.get(line, ()) if "::" in test}
    if not tests:
        tests = {test for found in by_line.values() for test in found if "::" in test}
    return sorted(tests, key=lambda test: (seconds.get(test, 60.0), test))


def _met(path: Path, place: Place, tests: list[str], tree: Path) -> Row:
    """Apply a mutation and run tests until one fails."""
    kept, begun, first = path.read_bytes(), time.monotonic(), 0
    apply(place, path)
    try:
        for last in (*GROUPS, len(tests)):
            left_s = MOST_S - (time.monotonic() - begun)
            if first < len(tests) and left_s > 0:
                failed = _failure(tests[first:last], tree, left_s)
                if failed:
                    return {"found": True, "by": failed, "tests": len(tests)}
            first = last
    finally:
        path.write_bytes(kept)
    return {"found": False, "tests": len(tests), "seconds": round(time.monotonic() - begun)}


def _failure(tests: list[str], tree: Path, within_s: float) -> str | None:
    """Return the first test that fails; None if all pass, or take too long together."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    started = subprocess.Popen(
        [str(tree / ".venv/bin/python"), "-m", "pytest", *options, *tests],
        cwd=tree,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = started.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, 9)
        started.communicate()
        return None
    if started.returncode == 0:
        return None
    failed = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or out.splitlines()[-1:] or ["no output"])[0][:160]


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
