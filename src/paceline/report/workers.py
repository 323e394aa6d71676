"""Tables and figures of asynchronous workers and of network traffic."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from paceline.core.outcome import UnevenWorker, Updates
from paceline.records.result import RunResult
from paceline.report.figures import (
    COLOURS,
    Described,
    Panel,
    decades,
    escaped,
    figure_of,
    learning_curves,
    line,
    losses_of,
    share_bars,
    whole_numbers,
)
from paceline.report.tables import traffic_table, workers_table

_HEIGHT = 290  # pixels
_SECONDS = {"title": "seconds of training", "rangemode": "tozero"}
_MOST_MISSED = 30  # the histogram's last bar, which also counts all larger values


def worker_sections(result: RunResult) -> dict[str, Any]:
    """Build the sections of the page by name; a section without data is None."""
    made, workers = result.updates, result.workers
    has_sizes = any(worker.batch_sizes for worker in workers)
    num_updates = 0 if made is None else made.count
    return {
        "traffic": traffic_table(result.traffic, num_updates) if result.traffic else None,
        "loss_in_time": _loss_in_time(result) if made and result.epochs else None,
        "updates": workers_table(result) if made else None,
        "gaps": _gaps(made) if made and made.gaps else None,
        "batch_sizes": _batch_sizes(workers) if made and has_sizes else None,
        "staleness": _staleness(made) if made else None,
        "most_missed": _MOST_MISSED,
        "utilisation": _utilisation(result) if result.utilisation else None,
    }


def _loss_in_time(result: RunResult) -> Described:
    seconds = list(accumulate(epoch.seconds for epoch in result.epochs))
    return learning_curves(_SECONDS["title"], seconds, _SECONDS, losses_of(result.epochs))


def _gaps(made: Updates) -> Described:
    """Draw how many updates the fastest worker is ahead of the slowest worker, over time."""
    # Updates of different workers may be recorded slightly out of order.
    times, gaps = zip(*sorted(made.gaps), strict=True)
    y: Described = {"title": "updates ahead of the last", "rangemode": "tozero"}
    panel = Panel([line(0, "ahead", times, gaps)], _SECONDS, y | whole_numbers(max(gaps)))
    return figure_of([panel], _HEIGHT)


def _batch_sizes(workers: Sequence[UnevenWorker]) -> Described:
    lines = []
    for i, worker in enumerate(workers):
        times, sizes = [time for time, _ in worker.batch_sizes], [n for _, n in worker.batch_sizes]
        lines.append(line(i, worker.name, times, sizes))
        lines[-1]["line"]["shape"] = "hv"
    every = [size for worker in workers for _, size in worker.batch_sizes]
    y = {"title": "samples"} | decades(every)
    return figure_of([Panel(lines, _SECONDS, y)], _HEIGHT)


def _staleness(made: Updates) -> Described:
    drawn: list[Described] = []
    for i, (name, counted) in enumerate(made.staleness.items()):
        bars = Counter[int]()
        for missed, times in counted.items():
            bars[min(missed, _MOST_MISSED)] += times
        total = sum(bars.values()) or 1
        bar: Described = {"type": "bar", "name": escaped(name), "x": list(bars)}
        bar |= {"y": [times / total for times in bars.values()]}
        drawn.append(bar | {"marker": {"color": COLOURS[i % len(COLOURS)]}})
    shown = [min(most, _MOST_MISSED) for counted in made.staleness.values() for most in counted]
    x = {"title": "updates of others that a batch missed"} | whole_numbers(max(shown, default=0))
    y = {"title": "share of batches", "tickformat": ".0~%"}
    return figure_of([Panel(drawn, x, y)], _HEIGHT)


def _utilisation(result: RunResult) -> Described:
    happened, predicted = result.utilisation, result.predicted_utilisation
    planned = {name: predicted.get(name, 0.0) for name in happened} if predicted else {}
    return share_bars({"happened": happened, "predicted": planned}, (COLOURS[0], COLOURS[5]))
