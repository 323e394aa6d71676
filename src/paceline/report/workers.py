"""Sections about asynchronous workers and about traffic, for runs that have such figures.

Updates, batch sizes, staleness and utilisation are figures 5 to 8 of Ma, Rusu et al. 2020.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from paceline.core.outcome import UnevenWorker, Updates
from paceline.records.result import RunResult
from paceline.report.figures import (
    COLOURS,
    TEST,
    TRAIN,
    Described,
    Panel,
    decades,
    escaped,
    figure_element,
    figure_of,
    share_bars,
    whole_numbers,
)
from paceline.report.format import nbytes, number, optional_share, share
from paceline.report.markup import Html, section, table

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_HEIGHT = 290  # pixels
_SECONDS = {"title": "seconds of training", "rangemode": "tozero"}
_MOST_MISSED = 30  # bars of the histogram; the last holds all beyond


def worker_sections(result: RunResult) -> Iterator[Html]:
    """Yield the sections for which the result has figures."""
    if result.traffic:
        yield _traffic(result)
    if result.updates is not None:
        if result.epochs:
            yield _loss_in_time(result)
        yield _updates(result.updates, result.workers)
        if any(worker.batch_sizes for worker in result.workers):
            yield _batch_sizes(result.workers)
        yield _staleness(result.updates)
    if result.utilisation:
        yield _utilisation(result.utilisation, result.predicted_utilisation)


def _traffic(result: RunResult) -> Html:
    notes = []
    if result.head is not None:
        head = result.head
        notes.append(
            f"The head ({', '.join(head.layers)}) is split by its outputs. Its parameters, "
            f"gradients and momentum take {nbytes(head.state_nbytes)}; a worker has "
            f"{nbytes(max(head.own_state_nbytes))} of them at the most, which saves "
            f"{nbytes(head.saved_nbytes)}. Below, the bytes that a worker sends in a step."
        )
    if result.wire_nbytes is not None:
        sent, received = result.wire_nbytes
        notes.append(
            "Without headers. With them, and with all other messages, this process sent "
            f"{nbytes(sent)} and received {nbytes(received)}."
        )
    count = 0 if result.updates is None else result.updates.count
    rows = []
    for row in result.traffic:
        where = "between processes" if row.travels else "within its process"
        of_an_update = (nbytes(row.nbytes / count),) if count else ()
        amounts = nbytes(row.planned_nbytes), nbytes(row.nbytes), *of_an_update
        rows.append((row.purpose, where, *amounts))
    columns = ("purpose", "where", "planned", "counted", *(("of an update",) if count else ()))
    return section("Bytes by purpose", " ".join(notes), table(columns, rows, (0, 1)))


def _loss_in_time(result: RunResult) -> Html:
    seconds = list(accumulate(epoch.seconds for epoch in result.epochs))
    curves: list[Described] = []
    for name, style in (("train", TRAIN), ("test", TEST)):
        losses = [getattr(epoch, f"{name}_loss") for epoch in result.epochs]
        curve = {"type": "scatter", "mode": "lines+markers", "x": seconds, "y": losses}
        curves.append({"name": f"{name} loss", **curve, **style})
    figure = figure_of([Panel(curves, _SECONDS)], _HEIGHT)
    note = "The training loss is the mean over an epoch, each batch on the model as it was then."
    return section("Loss against time", note, figure_element(figure, "loss-in-time"))


def _updates(made: Updates, workers: Sequence[UnevenWorker]) -> Html:
    by_name = {worker.name: worker for worker in workers}
    total = sum(made.by_worker.values()) or 1
    rows = []
    for name, count in made.by_worker.items():
        asked, predicted = ("-", "-", "-"), None
        if name in by_name:
            worker = by_name[name]
            tried, predicted = worker.tried_samples_per_s, worker.predicted_share
            asked = (worker.spec, "-" if tried is None else number(tried), f"{worker.samples:,}")
        rows.append((name, *asked, f"{count:,}", share(count / total), optional_share(predicted)))
    head = ("worker", "asked for", "tried", "samples", "updates", "share", "predicted")
    drawn = [table(head, rows, (0, 1))]
    if made.gaps:
        # Workers note their updates in turns, so that their clocks' times may come out of order.
        times, gaps = zip(*sorted(made.gaps), strict=True)
        line: Described = {"type": "scatter", "x": times, "y": gaps, "mode": "lines"}
        y: Described = {"title": "updates ahead of the last", "rangemode": "tozero"}
        y |= whole_numbers(max(gaps))
        panel = Panel([line | {"line": {"color": COLOURS[0]}}], _SECONDS, y)
        drawn.append(figure_element(figure_of([panel], _HEIGHT), "gaps"))
    note = "Updates of the shared model. Tried: samples/s before the training."
    return section("Updates", note, *drawn)


def _batch_sizes(workers: Sequence[UnevenWorker]) -> Html:
    lines: list[Described] = []
    for i, worker in enumerate(workers):
        colour, dash = COLOURS[i % len(COLOURS)], _DASHES[i % len(_DASHES)]
        times, sizes = [time for time, _ in worker.batch_sizes], [n for _, n in worker.batch_sizes]
        line: Described = {"type": "scatter", "x": times, "y": sizes, "mode": "lines"}
        line |= {"line": {"color": colour, "dash": dash, "shape": "hv"}}
        lines.append(line | {"name": escaped(worker.name)})
    every = [size for worker in workers for _, size in worker.batch_sizes]
    figure = figure_of([Panel(lines, _SECONDS, {"title": "samples"} | decades(every))], _HEIGHT)
    drawn = figure_element(figure, "sizes")
    return section("Batch size", "At the end of each batch; the policy decides.", drawn)


def _staleness(made: Updates) -> Html:
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
    figure = figure_of([Panel(drawn, x, y)], _HEIGHT)
    mean, most = f"{made.mean_staleness:.2f} on average", _MOST_MISSED
    note = f"{mean}. Bar {most} holds all that missed so many or more."
    return section("Staleness", note, figure_element(figure, "staleness"))


def _utilisation(happened: Mapping[str, float], predicted: Mapping[str, float]) -> Html:
    planned = {name: predicted.get(name, 0.0) for name in happened} if predicted else {}
    figure = share_bars({"happened": happened, "predicted": planned}, (COLOURS[0], COLOURS[5]))
    drawn = figure_element(figure, "utilisation")
    return section("Utilisation", "The share of the time in which a device computed.", drawn)
