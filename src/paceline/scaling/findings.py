"""What the cells of a study show: the fastest method, the workers that pay, what limits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.timeline import Origin
from paceline.scale_result import Cell

Limit = Literal["computation", "the link", "memory", "synchronisation"]
PAYS = 1.05  # what more workers, or samples, have to gain to be worth it
_REAL: tuple[Origin, ...] = ("measured", "rehearsed", "predicted")


@dataclass(frozen=True)
class Timed:
    """A cell in which all went well, with its seconds of an epoch."""

    cell: Cell
    epoch_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    update_s: float
    idle_s: float
    memory_bytes: int

    @classmethod
    def of(cls, cell: Cell) -> "Timed | None":
        """Return the cell with its figures, or None if it has none."""
        if cell.error is not None or not cell.epoch_s:
            return None
        return cls(
            cell,
            cell.epoch_s,
            cell.forward_s or 0.0,
            cell.backward_s or 0.0,
            cell.exposed_s or 0.0,
            cell.update_s or 0.0,
            cell.idle_s or 0.0,
            cell.memory_bytes or 0,
        )

    @property
    def rate(self) -> float:
        """Epochs of one worker's samples in a second: what can be compared across all cells."""
        return self._epochs / self.epoch_s

    @property
    def _epochs(self) -> int:
        """Epochs of one worker's samples in an epoch of all."""
        return self.cell.workers if self.cell.scaling == "weak" else 1

    @property
    def compute_s(self) -> float:
        """Forward, backward, weight update, and what is neither communication nor waiting."""
        return max(0.0, self.epoch_s - self.exposed_s - self.idle_s)

    @property
    def samples(self) -> int:
        """Samples of a worker's step."""
        one = self.cell
        return one.batch if one.scaling == "weak" else -(-one.batch // one.workers)

    def tells_apart(self, other: "Timed") -> bool:
        """Whether the rates of the two differ by more than their quartiles do."""
        mine, theirs = self.cell.spread, other.cell.spread
        if mine is None or theirs is None:
            return self.rate != other.rate
        return (
            mine[1] * other._epochs < theirs[0] * self._epochs
            or theirs[1] * self._epochs < mine[0] * other._epochs
        )


def looked_at(cells: Iterable[Cell]) -> list[Timed]:
    """Return the cells that are compared: of one kind, the most real one, and of one scaling."""
    timed = [one for one in map(Timed.of, cells) if one is not None]
    for kind in _REAL:
        of_kind = [one for one in timed if one.cell.kind == kind]
        strong = [one for one in of_kind if one.cell.scaling == "strong"]
        if of_kind:
            return strong or of_kind
    return []


def best(cells: Sequence[Timed]) -> Timed:
    """Return the fastest cell. ValueError if there are none."""
    return max(cells, key=lambda one: one.rate)


def alike(cells: Iterable[Timed], workers: int, batch: int) -> list[Timed]:
    """Return the cells of so many workers and that batch, the fastest first."""
    found = [one for one in cells if (one.cell.workers, one.cell.batch) == (workers, batch)]
    return sorted(found, key=lambda one: one.epoch_s)


def by_workers(cells: Iterable[Timed], batch: int) -> dict[int, Timed]:
    """Return the fastest cell of each number of workers with that batch, fewest workers first."""
    return _fastest([one for one in cells if one.cell.batch == batch], lambda one: one.cell.workers)


def by_samples(cells: Iterable[Timed], like: Timed) -> dict[int, Timed]:
    """Return the cells of the same method and workers, by the samples of a worker's step."""
    sort = (like.cell.method, like.cell.workers)
    same = [one for one in cells if (one.cell.method, one.cell.workers) == sort]
    return _fastest(same, lambda one: one.samples)


def _fastest(cells: Iterable[Timed], key: Callable[[Timed], int]) -> dict[int, Timed]:
    found: dict[int, Timed] = {}
    for one in cells:
        known = found.get(key(one))
        if known is None or one.rate > known.rate:
            found[key(one)] = one
    return dict(sorted(found.items()))


def worth(by_number: dict[int, Timed]) -> int:
    """Return the fewest workers beyond which more hardly gain, or lose."""
    most = max(one.rate for one in by_number.values())
    return next(number for number, one in by_number.items() if one.rate * PAYS >= most)


@dataclass(frozen=True)
class Memory:
    """A line through the memory of two batches: so much, and so much for each sample.

    A process may have been fullest before its steps. So memory is convex in the samples, and a
    batch larger than both needs at least what the line says.
    """

    fixed_bytes: float
    sample_bytes: float

    def largest(self, capacity_bytes: float) -> int:
        """Return a number of samples that no batch can exceed whose step fits."""
        return max(0, int((capacity_bytes - self.fixed_bytes) // self.sample_bytes))


def memory_of(cells: Iterable[Timed], like: Timed) -> Memory | None:
    """Return the line through the two largest batches; None if it does not grow."""
    found = by_samples(cells, like)
    if len(found) < 2:
        return None
    *_, (few, small), (many, large) = found.items()
    sample_bytes = (large.memory_bytes - small.memory_bytes) / (many - few)
    if sample_bytes <= 0:
        return None
    return Memory(small.memory_bytes - few * sample_bytes, sample_bytes)


def gains(one: Timed) -> dict[Limit, float]:
    """Return how many times as fast an epoch would be without each of what it takes time for.

    Without what shows of the communication, without waiting, and with devices twice as fast.
    """
    whole = one.epoch_s
    return {
        "the link": _times(whole, one.exposed_s),
        "synchronisation": _times(whole, one.idle_s),
        "computation": _times(whole, one.compute_s / 2),
    }


def _times(whole_s: float, saved_s: float) -> float:
    return whole_s / max(whole_s - saved_s, 1e-9 * whole_s)


def limit(cells: Sequence[Timed], one: Timed) -> Limit:
    """Return what limits a cell: memory, if a larger batch would pay and twice of it do not fit.

    Otherwise the largest of computation, exposed communication and waiting.
    """
    if _lacks_memory(cells, one):
        return "memory"
    parts: dict[Limit, float] = {
        "computation": one.compute_s,
        "the link": one.exposed_s,
        "synchronisation": one.idle_s,
    }
    return max(parts, key=lambda name: parts[name])


def _lacks_memory(cells: Sequence[Timed], one: Timed) -> bool:
    line, capacity = memory_of(cells, one), one.cell.capacity_bytes
    if line is None or capacity is None:
        return False
    *smaller, (largest, _) = by_samples(cells, one).items()
    if largest != one.samples:
        return False
    pays = one.rate > PAYS * smaller[-1][1].rate
    return pays and line.largest(capacity) < 2 * one.samples
