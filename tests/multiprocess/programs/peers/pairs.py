"""Run programs on pairs of ranks: python pairs.py FOLDER REFERENCE EXCHANGES FILES_OR_PROGRAMS.

An exchange may be followed by the files that it is to run alone: auto:loops+switching.

One pair runs many programs, as imports take seconds. Where a program hangs, or ends a rank, the
outcome says so, and a fresh pair goes on with what is left. For each program and exchange a line is
printed: [program, exchange, what went wrong, seconds]. The folder must be empty; the rest are lists
with commas. Exchange "ddp_again" shows whether a program is the same each time it runs.
"""

import ast
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ALL_S = 3000.0  # for all pairs; each program has a deadline of its own, too
LAUNCH = """
import sys
from paceline.links.launch import launch
launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]))
"""
# What gloo says, rarely, when it loses a connection between ranks that have just met: it is none of
# our doing, and the program may begin again.
GLOO_LOST = "Gloo connectFullMesh failed"
ATTEMPTS = 3
EXACT = "alone"  # runs beside the reference where a program asks for it

Orders = list[tuple[str, str, list[str]]]  # programs, references and exchanges
Key = tuple[str, str]  # a program and an exchange
Told = tuple[list[str], float]  # what went wrong, and the seconds it took


def names_in(files: list[Path]) -> list[str]:
    """The programs in these files, without importing anything."""
    return [
        f"{file.stem}.{node.name}"
        for file in sorted(files)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and any(map(_registers, node.decorator_list))
    ]


def _registers(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id == "program"


def run_all(folder: Path, orders: Orders) -> None:
    """Carry out all orders, with as many pairs as it takes."""
    tried: Counter[Key] = Counter()
    end = time.monotonic() + ALL_S
    number = 0
    while orders and time.monotonic() < end:
        own = folder / f"pair{number}"
        own.mkdir()
        done = _run_pair(own, orders, end)
        tried.update(done.keys())
        again = {key for key in done if _may_begin_again(done[key]) and tried[key] < ATTEMPTS}
        orders = _left(orders, {key: done[key] for key in done if key not in again})
        number += 1
    for name, _, exchanges in orders:
        for exchange in exchanges:
            print(json.dumps([name, exchange, ["others took too long"], 0.0]))


def _may_begin_again(told: Told) -> bool:
    return any(GLOO_LOST in text for text in told[0])


def _run_pair(folder: Path, orders: Orders, end: float) -> dict[Key, Told]:
    """Run what one pair can; return what came of it."""
    (folder / "orders.json").write_text(json.dumps(orders))
    command = [sys.executable, "-c", LAUNCH, "2", str(HERE / "rank.py"), str(folder)]
    with (folder / "stderr.txt").open("w") as errors:
        pair = subprocess.Popen(command, stderr=errors, env=os.environ | _in_folder(folder))
        try:
            pair.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pair.terminate()  # it takes its ranks along
            pair.wait()
    written = folder / "outcomes.jsonl"
    lines = (
        [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    )
    done = {tuple(line["ended"]): _told(line) for line in lines if "ended" in line}
    begun = [tuple(line["begins"]) for line in lines if "begins" in line]
    cut = begun[-1] if begun and begun[-1] not in done else None
    if not begun:
        raise SystemExit(f"no program ran: {(folder / 'stderr.txt').read_text()[-3000:]}")
    if cut is not None:
        done[cut] = [f"ended in the middle: {_why(folder)}"], 0.0
    return done


def _in_folder(folder: Path) -> dict[str, str]:
    """Where torch.compile keeps what it generates."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def _left(orders: Orders, done: dict[Key, Told]) -> Orders:
    """Print what is done, and return what is not."""
    left: Orders = []
    for name, reference, exchanges in orders:
        failures = [
            text for one in (reference, EXACT) for text in done.get((name, one), ([], 0.0))[0]
        ]
        for exchange in exchanges:
            if failures:  # of the program itself
                print(json.dumps([name, exchange, [f"{reference}: {failures}"], 0.0]), flush=True)
            elif (name, exchange) in done:
                print(json.dumps([name, exchange, *done[name, exchange]]), flush=True)
        missing = [one for one in exchanges if (name, one) not in done]
        if missing and not failures:
            left.append((name, reference, missing))
    return left


def _told(line: dict[str, Any]) -> Told:
    """What went wrong on any rank."""
    failures = []
    for rank, outcome in enumerate(line["ranks"]):
        said = [f"rank {rank}: {text}" for text in outcome["failures"]]
        failures += [*said, outcome["traceback"]] if outcome["traceback"] else said
    return failures, max(outcome["s"] for outcome in line["ranks"])


def _why(folder: Path) -> str:
    """Where the ranks were when they got stuck, or what the pair said before it died."""
    stuck = [
        f"rank {rank} was at\n{_main_thread(folder / f'stuck{rank}.txt')}" for rank in range(2)
    ]
    return "\n".join([*stuck, (folder / "stderr.txt").read_text()[-2000:]])


def _main_thread(file: Path) -> str:
    text = file.read_text() if file.exists() else ""
    threads = text.split("\n\n")
    main = [thread for thread in threads if "rank.py" in thread]
    return "\n".join((main or [text])[0].splitlines()[:25])


def main() -> None:
    folder, reference = Path(sys.argv[1]), sys.argv[2]
    exchanges, wanted = (argument.split(",") for argument in sys.argv[3:5])
    files = [HERE / f"{name}.py" for name in wanted if "." not in name]
    names = names_in(files) + [name for name in wanted if "." in name]
    run_all(folder, [(name, reference, _asked(exchanges, name)) for name in names])


def _asked(exchanges: list[str], program: str) -> list[str]:
    """The exchanges that a program is to run with."""
    parts = [exchange.partition(":") for exchange in exchanges]
    file = program.partition(".")[0]
    return [name for name, _, files in parts if not files or file in files.split("+")]


if __name__ == "__main__":
    main()
