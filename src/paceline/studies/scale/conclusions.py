"""State the findings of a study: the best method and workers, the limit, and the remedy."""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pydantic import TypeAdapter

from paceline.core.outcome import Insight
from paceline.core.timeline import Origin
from paceline.records.scale import Part, ScaleCell, Scaling, TimedCell, most_real, timed
from paceline.report.format import counted, duration, nbytes, number, share

Limit = Part | Literal["memory"]
PAYS = 1.05  # the least gain for which more workers, or samples, are worth it
_SCALINGS = get_args(Scaling)
_CLOSE = 1.02  # a single repetition has no quartiles, and is no more precise than that


class _Words(NamedTuple):
    """The words for a part of an epoch: its name, a subject and verb, a remedy and its effect."""

    name: str
    subject: str
    remedy: str
    effect: str
    gain: str


_WORDS = TypeAdapter(dict[Part, _Words]).validate_python(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
)


def comparable(cells: Iterable[ScaleCell]) -> list[TimedCell]:
    """Return the cells of the most real kind that there is, and of one scaling."""
    known = most_real(timed(cells))
    first = min((_SCALINGS.index(one.scaling) for one in known), default=0)
    return [one for one in known if one.scaling == _SCALINGS[first]]


def by_workers(cells: Iterable[TimedCell], batch: int) -> dict[int, TimedCell]:
    """Return the fastest cell with this batch for each number of workers, in ascending order."""
    return _fastest_by([one for one in cells if one.batch == batch], lambda one: one.workers)


def by_samples(cells: Iterable[TimedCell], like: TimedCell) -> dict[int, TimedCell]:
    """Return the cells of the same method and workers, by the samples of a worker's step."""
    sort = (like.method, like.workers)
    same = [one for one in cells if (one.method, one.workers) == sort]
    return _fastest_by(same, lambda one: one.samples)


def _fastest_by(
    cells: Iterable[TimedCell], key: Callable[[TimedCell], int]
) -> dict[int, TimedCell]:
    found: dict[int, TimedCell] = {}
    for one in sorted(cells, key=lambda one: (key(one), -one.rate)):
        found.setdefault(key(one), one)
    return found


def worth(by_number: dict[int, TimedCell]) -> int:
    """Return the fewest workers that are nearly as fast as the best number."""
    most = max(one.rate for one in by_number.values())
    return next(number for number, one in by_number.items() if one.rate * PAYS >= most)


@dataclass(frozen=True)
class MemoryLine:
    """A line through the memory of two batches: a fixed part, and a part for each sample.

    A small batch may need less than the process did before its steps. So the peak is convex in the
    samples, and a larger batch needs at least the value of the line.
    """

    fixed_bytes: float
    sample_bytes: float

    def largest(self, capacity_bytes: float) -> int:
        """Return an upper bound of the samples whose step fits."""
        return max(0, int((capacity_bytes - self.fixed_bytes) // self.sample_bytes))


def memory_of(cells: Iterable[TimedCell], like: TimedCell) -> MemoryLine | None:
    """Return the line through the two largest batches; None if memory does not grow."""
    found = by_samples(cells, like)
    if len(found) < 2:
        return None
    *_, (few, small), (many, large) = found.items()
    sample_bytes = (large.memory_bytes - small.memory_bytes) / (many - few)
    if sample_bytes <= 0:
        return None
    return MemoryLine(small.memory_bytes - few * sample_bytes, sample_bytes)


def gains(one: TimedCell) -> dict[Part, float]:
    """Return the speed-up of an epoch without each of its limits.

    That is without exposed communication, without waiting, and with devices twice as fast.
    """
    whole_s = one.epoch_s
    saved_s = one.parts | {"computation": one.parts["computation"] / 2}
    return {name: whole_s / max(whole_s - saved, 1e-9 * whole_s) for name, saved in saved_s.items()}


def limit(cells: Sequence[TimedCell], one: TimedCell) -> Limit:
    """Return the limit of a cell: memory, if a larger batch pays and twice its size does not fit.

    Otherwise it is the largest of computation, exposed communication and waiting.
    """
    line, capacity = memory_of(cells, one), one.capacity_bytes
    if line is not None and capacity is not None:
        *smaller, (largest, _) = by_samples(cells, one).items()
        before = smaller[-1][1]
        pays = one.rate > PAYS * before.rate and one.tells_apart(before)
        if largest == one.samples and pays and line.largest(capacity) < 2 * one.samples:
            return "memory"
    return max(one.parts, key=one.parts.__getitem__)


def insights(model: str, cells: Iterable[ScaleCell]) -> tuple[Insight, ...]:
    """Return the conclusions about a model; none if all cells failed.

    They are about cells of one kind (measured rather than rehearsed rather than predicted), and of
    strong scaling if there are such, with a shared batch rather than one for each worker.
    """
    known = comparable(cells)
    if not known:
        return ()
    first = max(known, key=lambda one: one.rate)
    found = (
        _method(model, known, first),
        _workers(known, first),
        _limit(known, first),
        _change(known, first),
        _memory(known, first),
    )
    return tuple(one for one in found if one is not None)


def _where(one: TimedCell) -> str:
    per = "" if one.scaling == "strong" else " each"
    return f"on {counted(one.workers, 'worker')} with a batch of {one.batch}{per}"


def _method(model: str, known: Sequence[TimedCell], first: TimedCell) -> Insight | None:
    """State the fastest method, on several workers if possible, and the reason."""
    batch = first.batch
    most = max(one.workers for one in known if one.batch == batch)
    workers = first.workers if first.workers > 1 else most
    same = [one for one in known if (one.workers, one.batch) == (workers, batch)]
    if len(same) < 2:
        return None
    compared = sorted(same, key=lambda one: one.epoch_s)
    code, told = _least_alone(compared) if workers == 1 else _fastest(compared)
    figures = [(f"epoch with {one.method}", duration(one.epoch_s)) for one in compared]
    figures += [
        (f"{words.name} with {one.method}", duration(one.parts[part]))
        for part, words in _WORDS.items()
        for one in compared[:2]
    ]
    return Insight("method", f"For {model} {told}.", tuple(figures), f"method.{code}")


def _equal_to(winner: TimedCell, others: Iterable[TimedCell]) -> list[TimedCell]:
    """Return the cells of as many workers that cannot be told apart from the fastest of them."""
    return [
        one
        for one in others
        if not winner.tells_apart(one) or one.epoch_s < _CLOSE * winner.epoch_s
    ]


def _least_alone(compared: Sequence[TimedCell]) -> tuple[str, str]:
    """Return the finding about methods on one worker, of which the first takes least."""
    winner, *others = compared
    equal = _equal_to(winner, others)
    dearer = [one for one in others if one not in equal]
    if not dearer:
        told = "on one worker all methods take the same, within what the figures can tell"
        return "alone.equal", told
    least = " or ".join(one.method for one in (winner, *equal))
    more = share(dearer[-1].epoch_s / winner.epoch_s - 1)
    told = f"on one worker {least} costs least, and {dearer[-1].method} {more} more"
    return "alone.least", told


def _fastest(compared: Sequence[TimedCell]) -> tuple[str, str]:
    """Return the finding about methods on several workers, of which the first is fastest."""
    winner, second, *_ = compared
    where, name = _where(winner), winner.method
    if equal := _equal_to(winner, compared[1:]):
        other = equal[0]
        ratio = other.epoch_s / winner.epoch_s
        if ratio < _CLOSE:
            told = f"{where} {name} and {other.method} are equally fast"
            return "equal", f"{told}, within what the figures can tell"
        beside = f"{number(ratio)} times as fast as {other.method}"
        told = f"{where} {name} may be the fastest, {beside}, but {_overlap(winner)}"
        return "may_be_fastest", told
    # The part of an epoch in which the winner gains most.
    part = max(_WORDS, key=lambda part: second.parts[part] - winner.parts[part])
    mine, theirs = (duration(one.parts[part]) for one in (winner, second))
    return "fastest", (
        f"{where} {name} is the fastest, {number(second.epoch_s / winner.epoch_s)} times as fast "
        f"as {second.method}: {_WORDS[part].name} takes {mine} of an epoch, and there {theirs}"
    )


def _overlap(one: TimedCell) -> str:
    """Return why a cell and another one of its kind cannot be told apart."""
    spreads = "ranges" if one.kind is Origin.PREDICTED else "quartiles"
    return f"their {spreads} overlap"


def _workers(known: Sequence[TimedCell], first: TimedCell) -> Insight | None:
    """State the number of workers worth using, and the gain or loss of more."""
    found = by_workers(known, first.batch)
    if len(found) < 2:
        return None
    base, last, pays = next(iter(found.values())), [*found.values()][-1], worth(found)
    chosen = found[pays]
    each = "" if chosen.scaling == "strong" else " each"
    sentence = f"With a batch of {first.batch}{each}, {counted(pays, 'worker')} "
    code, gain = _gain(chosen, list(found.values()))
    sentence += gain
    if last is not chosen:
        more, effect = _effect(last, chosen)
        sentence, code = f"{sentence}; {last.workers} {effect}", f"{code}.{more}"
    figures = tuple(
        (f"speed-up on {counted(count, 'worker')}, {one.method}", number(one.rate / base.rate))
        for count, one in found.items()
    )
    return Insight("workers", f"{sentence}.", figures, f"workers.{code}")


def _effect(more: TimedCell, chosen: TimedCell) -> tuple[str, str]:
    """Return what more workers would do, and that they may if the two cannot be told apart."""
    change = more.rate / chosen.rate - 1
    by, sure = share(abs(change), 0), more.tells_apart(chosen)
    if by == share(0, 0):
        return ("same", "are as fast") if sure else ("may_be_same", "may be as fast")
    effect = "gain" if change > 0 else "lose"
    if sure:
        return effect, f"would {effect} {by}"
    return f"may_{effect}", f"may {effect} {by}, but {_overlap(more)}"


def _gain(chosen: TimedCell, by_number: Sequence[TimedCell]) -> tuple[str, str]:
    """Return the finding about the workers of `chosen`, beside fewer and more of them."""
    base = by_number[0]
    if chosen is base:
        may_pay = any(chosen.longest_s > PAYS * one.shortest_s for one in by_number[1:])
        if may_pay:
            return "may_be_enough", "may be enough"
        return "enough", f"{'is' if chosen.workers == 1 else 'are'} enough"
    speedup, times = chosen.rate / base.rate, chosen.workers / base.workers
    beside = f"{number(speedup)} times as fast as {counted(base.workers, 'worker')}"
    fewer = [one for one in by_number if one.workers < chosen.workers]
    equal = next((one for one in fewer if not one.tells_apart(chosen)), None)
    if equal is base:
        return "may_pay", f"may pay: {beside}, but {_overlap(chosen)}"
    if equal is not None:
        fewer_do = f"{equal.workers} may do as well, for {_overlap(chosen)}"
        return "fewer_may_do", f"may pay: {beside}; {fewer_do}"
    if speedup > PAYS * times:
        return "doubtful", (
            f"seem to be {beside}, more than the {number(times)} times that sharing the work can "
            "gain: measure again on a machine that nothing else uses"
        )
    reached = min(1.0, speedup / times)
    of_all = f"{share(reached, 0)} of what as many would reach without losses"
    return "pay", f"still pay: {beside}, {of_all}"


def _limit(known: Sequence[TimedCell], first: TimedCell) -> Insight:
    name, whole_s = limit(known, first), first.epoch_s
    figures = [(_WORDS[part].name, share(one / whole_s)) for part, one in first.parts.items()]
    where = f"{first.method} {_where(first)}"
    if name == "memory":
        sentence = (
            f"Memory limits {where}: larger batches would be faster still, but twice "
            f"{first.samples} samples of a worker do not fit"
        )
        figures.append(("memory of a worker", nbytes(first.memory_bytes)))
    else:
        sentence = (
            f"{name[0].upper()}{name[1:]} limits {where}: {_WORDS[name].subject} "
            f"{share(first.parts[name] / whole_s, 0)} of an epoch"
        )
    return Insight("limit", f"{sentence}.", tuple(figures), f"limit.{_code(name)}")


def _code(name: Limit) -> str:
    return name.removeprefix("the ")


def _change(known: Sequence[TimedCell], first: TimedCell) -> Insight:
    found, code = gains(first), "memory"
    if limit(known, first) == "memory":
        sizes = by_samples(known, first)
        smaller = max(size for size in sizes if size < first.samples)
        gained = first.rate / sizes[smaller].rate
        sentence = (
            "First make room for a larger batch: more memory, or half the bytes a value; going "
            f"from {smaller} samples of a worker to {first.samples} has made it "
            f"{number(gained)} times as fast"
        )
    else:
        name = max(_WORDS, key=found.__getitem__)
        code = _code(name)
        sentence = (
            f"First {_WORDS[name].remedy}; {_WORDS[name].effect} an epoch would take "
            f"{duration(first.epoch_s / found[name])} for {duration(first.epoch_s)}"
        )
    figures = [
        (words.gain, f"{number(found[part])} times as fast") for part, words in _WORDS.items()
    ]
    return Insight("change", f"{sentence}.", tuple(figures), f"change.{code}")


def _memory(known: Sequence[TimedCell], first: TimedCell) -> Insight | None:
    line, capacity = memory_of(known, first), first.capacity_bytes
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
    return Insight("memory", f"{sentence}.", figures, "memory.grows")
