"""Compare predictions with published scaling tables, calibrated on one device's throughput.

Each line of families.jsonl is a family: a model on one kind of machine, with printed samples/s by
number of devices. Predictions are those of `paceline.plan(..., measured=...)` for strategy
allreduce. This benchmark trains nothing.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from figures import Part, table
from paceline.core.errors import InvalidInput
from paceline.planner import Forecast, forecast
from paceline.planner.device_speed import DeviceRate, calibrated
from paceline.records.catalogue import EqualDevices
from paceline.strategies import STRATEGIES
from papers.networks import step_of

HERE = Path(__file__).parent
_TUNED, _CHECKED = "tuned", "checked"
_EVERY = 20
_STRATEGY = STRATEGIES["allreduce"]
Family = dict[str, Any]


class Cell(NamedTuple):
    """Samples/s with more than one device: printed, predicted, and N times one device (`linear`).

    `range_share`: half width of the predicted range, relative to the predicted step. `method`: see
    `method_of`.
    """

    half: str
    source: str
    method: str
    num_devices: int
    printed: float
    ours: float
    range_share: float
    linear: float

    @property
    def is_in_range(self) -> bool:
        """Whether the printed step is within the predicted range."""
        return abs(self.ours / self.printed - 1) <= self.range_share


def half_of(family: Family) -> str:
    """Return the family's half: `tuned` families were used to choose losses, `checked` were not.

    A hash of source, model and device decides, so that a table's families are mostly together.
    """
    text = "|".join((source_of(family), family["model"], family["device"]))
    return (_TUNED, _CHECKED)[hashlib.sha256(text.encode()).digest()[-1] % 2]


def source_of(family: Family) -> str:
    """Return the name of a family's source, without details and address."""
    return family["source"].split(",")[0].split("(")[0].strip()


def method_of(family: Family) -> str:
    """Return the source's exchange method, and whether it trains on real images."""
    how, remark = family["how"], family["remark"]
    by_servers = any(words in how for words in ("server", "dist_device_sync"))
    by_cores = "MPI" in how
    reduced = not by_cores and any(words in how for words in ("all-reduce", "replicated", "NCCL"))
    method = "parameter servers" if by_servers else "all-reduce on GPUs" if reduced else "others"
    is_real = any(words in remark for words in ("eal Imag", "eal imag", "CIFAR"))
    return f"{method}, real images" if is_real else method


def cells_of(family: Family) -> list[Cell]:
    """Return a family's cells of more than one device; InvalidInput if it cannot be planned."""
    ((_, alone),) = [cell for cell in family["cells"] if cell[0] == 1]
    found = []
    for count, printed in family["cells"]:
        if count == 1:
            continue
        step = _planned(family, count, alone)
        own = half_of(family), source_of(family), method_of(family), count, printed
        found.append(Cell(*own, step.samples_per_s, step.range_share, count * alone))
    return found


def _planned(family: Family, count: int, alone: float) -> Forecast:
    """Return the forecast for allreduce, as `paceline.plan(..., measured=...)` computes it."""
    size, per_host = family["batch_per_device"], family["devices_per_host"]
    hosts = -(-count // per_host)
    equal = EqualDevices(
        device=family["device"],
        devices=per_host if hosts > 1 else count,
        hosts=hosts,
        link=family["link"],
        network=(family["network"] or "10gbe") if hosts > 1 else None,
        rails=family.get("rails", 1) if hosts > 1 else 1,
    )
    described = partial(step_of, family["model"])
    machine = equal.machine("published")
    machine = calibrated(machine, described, DeviceRate(alone, size), size)
    part = machine.for_workers(count, _STRATEGY.planning.symmetric)
    config = _STRATEGY.config(workers=count, codec=family.get("gradients"))
    return forecast(described(size), part, _STRATEGY, config, count * size)


def measure(quick: bool) -> dict[str, Any]:
    """Return all cells, and the reasons why some families cannot be planned."""
    lines = (HERE / "families.jsonl").read_text().splitlines()
    cells: list[dict[str, Any]] = []
    refused = []
    with ProcessPoolExecutor() as pool:
        for found in pool.map(_cells_or_why, lines[:: _EVERY if quick else 1]):
            if isinstance(found, str):
                refused.append(found)
            else:
                cells += [one._asdict() for one in found]
    return {"cells": cells, "refused": refused}


def _cells_or_why(line: str) -> list[Cell] | str:
    family = json.loads(line)
    try:
        return cells_of(family)
    except InvalidInput as error:
        return f"{source_of(family)}, {family['model']}: {error}"


def text(figures: Mapping[str, Any]) -> str:
    """Return tables of errors by half, source, method and number of devices."""
    cells = [Cell(**one) for one in figures["cells"]]
    refused = figures["refused"]
    tables = [
        _errors("Both halves", "half", cells, [one.half for one in cells]),
        _errors("By source", "source", cells, [one.source for one in cells]),
        _errors("By method", "method", cells, [one.method for one in cells]),
        _errors("By devices", "devices", cells, [one.num_devices for one in cells]),
    ]
    return "\n\n".join([*tables, f"{len(refused)} families cannot be planned.", *refused])


def _errors(title: str, what: str, cells: Sequence[Cell], keys: Iterable[Any]) -> str:
    groups = defaultdict(list)
    for cell, key in zip(cells, keys, strict=True):
        groups[key].append(cell)
    head = (what, "cells", "ours", "median", "bias", "in range", "N times one")
    lines = []
    for key, own in [*sorted(groups.items()), ("all", list(cells))]:
        ours = [one.ours / one.printed - 1 for one in own]
        naive = f"{mean(abs(one.linear / one.printed - 1) for one in own):.1%}"
        error = f"{mean(map(abs, ours)):.1%}"
        middle, bias = f"{median(map(abs, ours)):.1%}", f"{mean(ours):+.1%}"
        within = f"{mean(one.is_in_range for one in own):.0%}"
        lines.append((str(key), str(len(own)), error, middle, bias, within, naive))
    return table(title, head, lines)


PARTS = {"published": Part(measure, text)}
