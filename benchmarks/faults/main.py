"""Measure how training survives lying workers, signals, lost connections and damaged files.

`lies`: workers with valid keys send false messages. `loop`: signals and cut connections at random
moments. `files` and `frames`: mutated input for every parser. `lies` and `loop` print each run's
seed and faults when it ends.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import fuzz
import lies
import loop

from figures import Part, table

_FILES = tuple(one.name for one in fuzz.files.PARSERS)
_FRAMES = tuple(one.name for one in fuzz.wire.PARSERS)


def _text_of_lies(figures: Mapping[str, Any]) -> str:
    lines = []
    for strategy, bound in figures["bounds_nbytes"].items():
        runs = [one for one in figures["runs"] if one["strategy"] == strategy]
        peak = max(one["peak_nbytes"] for one in runs)
        well = sum(not one["faults"] for one in runs)
        told = sum(one["lies"] for one in runs)
        memory = f"{_mib(peak)} of {_mib(bound)}; {_mib(figures['honest_nbytes'][strategy])}"
        lines.append([strategy, str(len(runs)), f"{told:,}", str(well), memory])
    head = ["strategy", "runs", "lies", "ended with a result", "memory of the hub, MiB: peak of "]
    head[-1] += "bound; without lies"
    rules = ", ".join(f"{name} {count}" for name, count in Counter(figures["lies"]).most_common())
    return f"{table('Lies of workers with keys', head, lines)}\n\nBy rule: {rules}."


def _text_of_loop(figures: Mapping[str, Any]) -> str:
    rows: dict[str, Counter[str]] = {}
    for trial in figures["trials"]:
        for name in (trial["case"], "all"):
            own = rows.setdefault(name, Counter())
            own.update({"faults": len(trial["faults"]), trial["outcome"]: 1})
    rows["all"] = rows.pop("all")
    outcomes = ("recovered", "ended in order", "failed")
    lines = [
        [name, *(str(own[one]) for one in ("faults", *outcomes))] for name, own in rows.items()
    ]
    kinds = Counter(one["kind"] for trial in figures["trials"] for one in trial["faults"])
    shown = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    head = ["what trains", "faults", *(f"runs that {one}" for one in outcomes)]
    return f"{table('Faults at random', head, lines)}\n\nFaults: {shown}."


def _text_of_fuzzed(figures: Mapping[str, Any]) -> str:
    rows = figures["parsers"]
    lines = [
        [
            *(one["parser"], f"{one['tried']:,}", f"{one['refused']:,}", f"{one['accepted']:,}"),
            str(sum(one[key] for key in fuzz.KINDS[2:])),
            *(f"{one['longest_s']:.2f}", _mib(one["peak_nbytes"])),
        ]
        for one in rows
    ]
    total = sum(one["tried"] for one in rows)
    limits = f"{figures['seconds']} s and {_mib(figures['memory_nbytes'])} MiB"
    head = ["parser", "tried", "refused in a line", "accepted", "else", "longest, s", "most, MiB"]
    return table(f"{total:,} changed inputs, of which each may take {limits}", head, lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f}"


PARTS = {
    "lies": Part(lambda quick: lies.measure(20 if quick else 2000), _text_of_lies),
    "frames": Part(
        lambda quick: fuzz.measure(_FRAMES, 1000 if quick else 900_000), _text_of_fuzzed
    ),
    "files": Part(lambda quick: fuzz.measure(_FILES, 500 if quick else 60_000), _text_of_fuzzed),
    "loop": Part(lambda quick: loop.measure(10 if quick else 500), _text_of_loop),
}
