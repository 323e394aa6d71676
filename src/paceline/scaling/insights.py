"""What a study says, in sentences: which method, how many workers, what limits, what to change."""

from collections.abc import Iterable, Iterator, Sequence

from paceline.core.insight import Insight
from paceline.report.format import duration, nbytes, number, share
from paceline.scale_result import Cell
from paceline.scaling.findings import (
    Limit,
    Timed,
    alike,
    best,
    by_samples,
    by_workers,
    gains,
    limit,
    looked_at,
    memory_of,
    worth,
)

_CLOSE = 1.02  # predictions are no better than that, and have no spread
_REMEDIES: dict[Limit, str] = {
    "the link": "send less, or over a faster link: a codec, a larger batch",
    "synchronisation": "let nobody wait: equal devices, or batches by their speed",
    "computation": "compute faster: faster devices, or a smaller network",
    "memory": "make room for a larger batch: more memory, or half the bytes a value",
}


def insights(model: str, cells: Iterable[Cell]) -> tuple[Insight, ...]:
    """Return what the cells say about a model; nothing if none of them has gone well.

    They are about cells of one kind, measured rather than rehearsed rather than predicted, and of
    strong scaling, if there are such.
    """
    known = looked_at(cells)
    if not known:
        return ()
    first = best(known)
    return tuple(
        one
        for one in (
            _method(model, known, first),
            _workers(known, first),
            _limit(known, first),
            _change(known, first),
            _memory(known, first),
        )
        if one is not None
    )


def _where(one: Timed) -> str:
    cell = one.cell
    per = " each" if cell.scaling == "weak" else ""
    return f"on {_workers_text(cell.workers)} with a batch of {cell.batch}{per}"


def _workers_text(workers: int) -> str:
    return f"{workers} worker{'s' * (workers > 1)}"


def _method(model: str, known: Sequence[Timed], first: Timed) -> Insight | None:
    """Say which method is the fastest, where workers exchange anything, and why."""
    most = max(one.cell.workers for one in known if one.cell.batch == first.cell.batch)
    workers = first.cell.workers if first.cell.workers > 1 else most
    compared = alike(known, workers, first.cell.batch)
    if len(compared) < 2:
        return None
    winner, *others = compared
    figures = tuple((f"epoch with {one.cell.method}", duration(one.epoch_s)) for one in compared)
    say = _on_one_worker if workers == 1 else _fastest
    sentence = f"For {model} {say(winner, others)}."
    return Insight("method", sentence, figures + tuple(_parts(winner, others[0])))


def _on_one_worker(winner: Timed, others: Sequence[Timed]) -> str:
    last = others[-1]
    if _are_close(winner, last):
        return "on one worker all methods take the same, within what the figures can tell"
    more = share(last.epoch_s / winner.epoch_s - 1)
    return f"on one worker {winner.cell.method} costs least, and {last.cell.method} {more} more"


def _fastest(winner: Timed, others: Sequence[Timed]) -> str:
    second = others[0]
    one, other = winner.cell.method, second.cell.method
    if _are_close(winner, second):
        return (
            f"{_where(winner)} {one} and {other} are equally fast, within what the figures can tell"
        )
    times = number(second.epoch_s / winner.epoch_s)
    return (
        f"{_where(winner)} {one} is the fastest, {times} times as fast as {other}: "
        f"{_why(winner, second)}"
    )


def _are_close(winner: Timed, other: Timed) -> bool:
    return not winner.tells_apart(other) or other.epoch_s < _CLOSE * winner.epoch_s


def _differences(winner: Timed, other: Timed) -> dict[str, tuple[float, float]]:
    """Return the parts of an epoch of both, by name."""
    return {
        "exposed communication": (winner.exposed_s, other.exposed_s),
        "waiting": (winner.idle_s, other.idle_s),
        "computation": (winner.compute_s, other.compute_s),
    }


def _why(winner: Timed, other: Timed) -> str:
    """Return the part of an epoch in which the other loses most."""
    parts = _differences(winner, other)
    name = max(parts, key=lambda part: parts[part][1] - parts[part][0])
    mine, theirs = parts[name]
    return f"{name} takes {duration(mine)} of an epoch, and there {duration(theirs)}"


def _parts(winner: Timed, other: Timed) -> Iterator[tuple[str, str]]:
    for name, seconds in _differences(winner, other).items():
        for one, value in zip((winner, other), seconds, strict=True):
            yield f"{name} with {one.cell.method}", duration(value)


def _workers(known: Sequence[Timed], first: Timed) -> Insight | None:
    """Say how many workers are worth using, and what more would do."""
    found = by_workers(known, first.cell.batch)
    if len(found) < 2:
        return None
    base, (most, last) = next(iter(found.values())), list(found.items())[-1]
    pays = worth(found)
    chosen = found[pays]
    speedup = chosen.rate / base.rate
    each = "" if chosen.cell.scaling == "strong" else " each"
    start = f"With a batch of {first.cell.batch}{each}, {_workers_text(pays)}"
    if chosen is base:
        sentence = f"{start} {_is(pays)} enough"
    else:
        sentence = (
            f"{start} still pay: {number(speedup)} times as fast as "
            f"{_workers_text(base.cell.workers)}, {share(speedup * base.cell.workers / pays, 0)} "
            "of what as many would reach without losses"
        )
    if most > pays:
        change = last.rate / chosen.rate - 1
        verb = "gain" if change >= 0 else "lose"
        sentence += f"; {most} would {verb} {share(abs(change), 0)}"
        if not last.tells_apart(chosen):
            sentence += ", which is within what the figures can tell"
    figures = tuple(
        (f"speed-up on {_workers_text(count)}, {one.cell.method}", number(one.rate / base.rate))
        for count, one in found.items()
    )
    return Insight("workers", f"{sentence}.", figures)


def _is(workers: int) -> str:
    return "is" if workers == 1 else "are"


def _shares(one: Timed) -> tuple[tuple[str, str], ...]:
    return (
        ("computation", share(one.compute_s / one.epoch_s)),
        ("exposed communication", share(one.exposed_s / one.epoch_s)),
        ("waiting", share(one.idle_s / one.epoch_s)),
    )


def _limit(known: Sequence[Timed], first: Timed) -> Insight:
    """Say what limits the fastest cell."""
    name, figures = limit(known, first), _shares(first)
    where = f"{first.cell.method} {_where(first)}"
    if name == "memory":
        sentence = (
            f"Memory limits {where}: larger batches would be faster still, but twice "
            f"{first.samples} samples of a worker do not fit"
        )
        figures += (("memory of a worker", nbytes(first.memory_bytes)),)
    else:
        seconds = {
            "computation": ("computation is", first.compute_s),
            "the link": ("communication that shows is", first.exposed_s),
            "synchronisation": ("waiting for other workers is", first.idle_s),
        }
        what, taken_s = seconds[name]
        sentence = (
            f"{name[0].upper()}{name[1:]} limits {where}: {what} "
            f"{share(taken_s / first.epoch_s, 0)} of an epoch"
        )
    return Insight("limit", f"{sentence}.", figures)


def _change(known: Sequence[Timed], first: Timed) -> Insight:
    """Say what to change first, by what it would gain."""
    found = gains(first)
    name: Limit = limit(known, first)
    if name == "memory":
        sizes = by_samples(known, first)
        smaller = max(size for size in sizes if size < first.samples)
        gained = first.rate / sizes[smaller].rate
        sentence = (
            f"First {_REMEDIES[name]}; going from {smaller} samples of a worker to "
            f"{first.samples} has made it {number(gained)} times as fast"
        )
    else:
        name = max(found, key=lambda one: found[one])
        condition = {
            "the link": "without the communication that shows",
            "synchronisation": "without the waiting",
            "computation": "on devices twice as fast",
        }[name]
        sentence = (
            f"First {_REMEDIES[name]}; {condition} an epoch would take "
            f"{duration(first.epoch_s / found[name])} for {duration(first.epoch_s)}"
        )
    figures = (
        ("without exposed communication", f"{number(found['the link'])} times as fast"),
        ("without waiting", f"{number(found['synchronisation'])} times as fast"),
        ("on devices twice as fast", f"{number(found['computation'])} times as fast"),
    )
    return Insight("change", f"{sentence}.", figures)


def _memory(known: Sequence[Timed], first: Timed) -> Insight | None:
    """Say how memory grows with the batch, and which one is the largest that fits."""
    line, capacity = memory_of(known, first), first.cell.capacity_bytes
    if line is None or capacity is None:
        return None
    most = max(by_samples(known, first))
    sentence = (
        f"A worker's memory grows by {nbytes(line.sample_bytes)} or more with each sample of its "
        f"step: at most {line.largest(capacity):,} fit into {nbytes(capacity)}"
    )
    figures = (
        (f"memory with {first.samples} samples", nbytes(first.memory_bytes)),
        ("of which does not grow", nbytes(max(0.0, line.fixed_bytes))),
        ("most samples looked at", str(most)),
    )
    return Insight("memory", f"{sentence}.", figures)
