"""Measure everything that needs a GPU, in parts with deadlines and a JSON file each.

    python benchmarks/gpu/main.py FOLDER [PART...] [--smoke]

Without PART, all parts run, in under seven minutes. --smoke uses tiny sizes to check that all
parts work; with PACELINE_SIMULATED_GPUS=1 in the environment it needs no GPU. Exit code: 0 if all
parts succeed, 1 if a part fails, 2 if this machine cannot run the measurements.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


# Limits of the parts, which are modules in evidence/, in seconds; together less than seven minutes.
PARTS = {
    "sums": 35.0,
    "hidden": 120.0,
    "beside": 60.0,
    "codecs": 20.0,
    "hogbatch": 110.0,
    "predicted": 65.0,
}
_SMOKE_DEADLINE_S = 600.0  # long, because the machine may be busy


def main() -> int:
    """Run the requested parts and print a summary."""
    parser = argparse.ArgumentParser(description="Measure Paceline on this machine's GPUs.")
    parser.add_argument("folder", type=Path, help="where each part leaves its JSON")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--smoke", action="store_true", help="only show that everything works")
    given = parser.parse_args()
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}; known: {', '.join(PARTS)}")
    if problem := _problem(smoke=given.smoke):
        print(f"gpu-evidence: {problem}", file=sys.stderr)
        return 2
    import supervise

    # Exit by an exception, so that `finally` blocks end the parts' processes.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    given.folder.mkdir(parents=True, exist_ok=True)
    done = []
    try:
        for name in given.parts or PARTS:
            path = given.folder.resolve() / f"{name}.json"
            limit_s = _SMOKE_DEADLINE_S if given.smoke else PARTS[name]
            done.append(supervise.run(path, f"evidence.{name}", limit_s, smoke=given.smoke))
    finally:
        found = supervise.summary(given.folder, PARTS)
        (given.folder / "README.md").write_text(found + "\n")
        print(f"\n{found}", flush=True)
    return 0 if all(done) else 1


def _problem(*, smoke: bool) -> str | None:
    """Return why this machine cannot run the measurements; None if it can."""
    if smoke:  # let this process and its children simulate GPUs if PACELINE_SIMULATED_GPUS is set
        sys.path.append(str(HERE.parents[1] / "tests"))
        from simulated_gpu.instead import CHILDREN

        known = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [known]), str(CHILDREN)])
    try:
        from paceline.core.errors import InvalidInput
        from paceline.links.devices import gpus
    except ImportError as error:
        how = "install it there, or name another Python's folder: make gpu-evidence BIN=/usr/bin"
        return f"{sys.executable} cannot import paceline ({error}); {how}"
    try:
        found = gpus()
    except InvalidInput as error:
        return str(error)
    if not found:
        return "there is no GPU here; PACELINE_SIMULATED_GPUS=1 and --smoke show that it works"
    if found[0].type != "cuda" and not smoke:
        return "simulated GPUs have no speed to measure; take --smoke"
    return None


if __name__ == "__main__":
    sys.exit(main())
