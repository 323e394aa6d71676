"""Cases of the all-reduce whose values travel encoded, against one process that knows all values.

Each is for so many ranks, the first of those that run.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Cast, Codec, Payload
from paceline.codecs.feedback import OneBit, Threshold
from paceline.codecs.names import find_codec
from paceline.exchange import compressed
from paceline.exchange.compressed import CompressedAllReduce
from ranks import CASES, QUICK_S, Place, batch, bits, main

PIECE = 1 << 13
LENGTHS = (0, 1, 2, 3, 5, 1023, 1025, 70_001, PIECE + 17)
TAU = 0.5
STEPS = range(45)
FAULT = 123.0
SENT = (70_001, PIECE + 17)  # lengths whose bytes are looked at

Factory = Callable[[], Codec]

MADE: dict[str, Factory] = {
    "dynamic8": lambda: find_codec("dynamic8"),
    "half": lambda: find_codec("half"),
    "bfloat16": lambda: find_codec("bfloat16"),
    "onebit": lambda: find_codec("onebit"),
    "threshold:0.5": lambda: find_codec("threshold:0.5"),
    "e3m0": lambda: find_codec("e3m0"),
    "dynamic4+feedback": lambda: find_codec("dynamic4+feedback"),
    "float32": lambda: Cast("float32"),
}
FORGETFUL: dict[str, Factory] = {
    "onebit": OneBit,
    "threshold:0.5": lambda: Threshold(TAU),
    "dynamic4+feedback": lambda: find_codec("dynamic4"),
}
WHOLE = ("e3m0", "dynamic4+feedback")  # of these no sum is encoded


class Oracle:
    """What the ranks ought to end up with: one process encodes for all of them."""

    def __init__(self, make: Factory, size: int, is_whole: bool) -> None:
        self._make, self._size, self._is_whole = make, size, is_whole
        self._codecs: dict[tuple[object, ...], Codec] = {}

    def mean(self, key: str, values: list[Tensor]) -> Tensor:
        """The mean of what the ranks have, piece by piece and shard by shard."""
        means = torch.empty_like(values[0])
        for begin in range(0, len(means), PIECE):
            count = min(PIECE, len(means) - begin)
            if self._is_whole:
                own = slice(begin, begin + count)
                sent = [self._sent((key, begin, rank), one[own]) for rank, one in enumerate(values)]
                means[own] = sum(sent[1:], sent[0]) / self._size
                continue
            size = -(-count // self._size)
            for owner in range(self._size):
                first, end = (min(count, size * place) for place in (owner, owner + 1))
                own = slice(begin + first, begin + end)
                total = values[owner][own].clone()
                for rank in range(self._size):
                    if rank != owner:
                        total += self._sent((key, begin, owner, rank), values[rank][own])
                means[own] = self._sent((key, begin, owner, owner), total / self._size)
        return means

    def _sent(self, place: tuple[object, ...], values: Tensor) -> Tensor:
        """What arrives of these values, of a rank's codec for this shard."""
        codec = self._codecs.setdefault(place, self._make())
        return codec.decode(codec.encode(values))


def numbered(size: int) -> Callable[[Callable[[Place, CompressedAllReduce], dict]], None]:
    """Make a function a case of the first `size` ranks, of whom it gets the all-reduce."""

    def register(function: Callable[[Place, CompressedAllReduce], dict]) -> None:
        def run(place: Place) -> dict:
            if place.rank >= size:
                return {}
            compressed.PIECE = PIECE
            members = Place(place.rank, size, place.exchange, place.deadline_s)
            all_reduce = opened(members)
            try:
                return function(members, all_reduce)
            finally:
                all_reduce.close()

        CASES[f"{function.__name__}_{size}"] = run

    return register


def opened(place: Place) -> CompressedAllReduce:
    return CompressedAllReduce(range(place.size), torch.device("cpu"), place.deadline_s)


def values_of(rank: int, step: int, count: int) -> Tensor:
    """Values of several magnitudes, block by block; no two ranks or steps have the same."""
    values = batch(rank, 100 * step + count % 97, count, dtype=torch.float32)
    return values * torch.logspace(-2, 1, -(-count // 700)).repeat_interleave(700)[:count]


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def right_means(place: Place, all_reduce: CompressedAllReduce) -> dict:
    """Two steps of all lengths at once, with each codec: what rank 0's differs in from the oracle.

    The others have the same `bits`.
    """
    wrong, order, ends, inexact, every, sent = [], [], [], [], [], {}
    for name, make in MADE.items():
        oracle = Oracle(make, place.size, name in WHOLE)
        for step in range(2):
            works = []
            for count in LENGTHS:
                work = all_reduce.begin(
                    f"{name}{count}", values_of(place.rank, step, count), make, place.size
                )
                order.append(work.key)
                work.future.then(lambda _, key=work.key: ends.append(key))
                works.append(work)
            found = [work.future.wait() for work in works]
            every += found
            for count, means in zip(LENGTHS, found if place.rank == 0 else (), strict=False):
                values = [values_of(rank, step, count) for rank in range(place.size)]
                if not _equal(means, oracle.mean(f"{name}{count}", values)):
                    wrong.append([name, count, step])
                if name == "float32" and not _nearly_exact(means, values):
                    inexact.append([count, step])
        for count in SENT:
            before = all_reduce.bytes_sent
            values = values_of(place.rank, 2, count)
            all_reduce.begin(f"{name}{count}", values, make, place.size).future.wait()
            sent[f"{name} {count}"] = all_reduce.bytes_sent - before
    outcome = {"wrong": wrong, "inexact": inexact, "sent": sent, "bits": bits(every)}
    return outcome | {"in_order": ends == order}


def _nearly_exact(means: Tensor, values: list[Tensor]) -> bool:
    """Whether they are the means but for the rounding of each addition and of the division."""
    exact = torch.stack(values).double()
    bound = (len(values) + 1) * 2.0**-24 * exact.abs().sum(0) / len(values)
    return bool(((means.double() - exact.mean(0)).abs() <= bound).all())


for _size in (1, 2, 3, 4):
    numbered(_size)(right_means)


def steady(rank: int, step: int, count: int) -> Tensor:
    """Values with means of their own that are not zero; none is greater than TAU."""
    noise = batch(rank, 1 + step, count, dtype=torch.float32).clamp(-3, 3) * 0.1
    return torch.linspace(-0.05, 0.05, count).roll(37 * rank) + noise


def _owed(all_reduce: CompressedAllReduce, place: Place, count: int, is_whole: bool) -> Tensor:
    """The mean that has not arrived yet: what senders owe to owners, and owners to all.

    Where no sum is encoded, it is what all owe to each other.
    """
    state = all_reduce.state_dict()
    owed = []
    for piece in range(-(-count // PIECE)):
        if is_whole:
            owed.append(state[f"all/{piece}/{place.rank}"].double() / place.size)
            continue
        for shard in range(place.size):
            error = state[f"all/{piece}/{shard}"].double()
            owed.append(error if shard == place.rank else error / place.size)
    total = torch.cat(owed)
    dist.all_reduce(total)
    return total


def _run(place: Place, all_reduce: CompressedAllReduce, make: Factory, steps: range, count: int):
    """Yield what arrived in each step less the true mean, float64."""
    for step in steps:
        all_reduce.begin_step()
        values = steady(place.rank, step, count)
        means = all_reduce.begin("all", values, make, place.size).future.wait()
        every = torch.stack([steady(rank, step, count) for rank in range(place.size)])
        yield means.double() - every.double().mean(0)


def feedback(place: Place, all_reduce: CompressedAllReduce) -> dict:
    """What the sum of many steps lacks, with feedback and without, and whether somebody owes it."""
    count, outcome = 700, {}
    for name, bare in FORGETFUL.items():
        all_reduce.load_state_dict({})
        errors = list(_run(place, all_reduce, MADE[name], STEPS, count))
        missing = torch.stack(errors).cumsum(0)
        unaccounted = (missing[-1] + _owed(all_reduce, place, count, name in WHOLE)).abs().max()
        all_reduce.load_state_dict({})
        without = torch.stack(list(_run(place, all_reduce, bare, STEPS, count))).cumsum(0)
        outcome[name] = {
            "unaccounted": float(unaccounted),
            "most": float(missing.abs().max()),
            "missing": missing.square().mean(1).sqrt()[[14, 44]].tolist(),
            "without": without.square().mean(1).sqrt()[[14, 44]].tolist(),
        }
    return outcome


def checkpoint(place: Place, all_reduce: CompressedAllReduce) -> dict:
    """Go on from the state of each rank in a new all-reduce, and in one without that state."""
    count, outcome = PIECE + 301, {}
    for name in FORGETFUL:
        all_reduce.load_state_dict({})
        for _ in _run(place, all_reduce, MADE[name], range(4), count):
            pass
        state = all_reduce.state_dict()
        chains = [bits(_run(place, all_reduce, MADE[name], range(4, 8), count))]
        for loaded in (state, {}):
            other = opened(place)
            other.load_state_dict(loaded)
            chains.append(bits(_run(place, other, MADE[name], range(4, 8), count)))
            other.close()
        outcome[name] = chains
    return outcome


def forgetting(place: Place, all_reduce: CompressedAllReduce) -> dict:
    """Which keys are remembered after steps that use some of them."""
    remembered = []
    for used in (("a", "b"), ("a",), ("a", "c"), ("c",), ()):
        all_reduce.begin_step()
        for key in used:
            values = steady(place.rank, 0, 100)
            all_reduce.begin(key, values, MADE["onebit"], place.size).future.wait()
        remembered.append(sorted({key.partition("/")[0] for key in all_reduce.state_dict()}))
    return {"remembered": remembered}


class Faulty(Cast):
    """A codec that fails when it is told to."""

    def encode(self, values: Tensor) -> Payload:
        if values.numel() and bool((values == FAULT).any()):
            raise ValueError("this cannot be encoded")
        return super().encode(values)


def broken(place: Place, all_reduce: CompressedAllReduce) -> dict:
    """What becomes of three exchanges of one size, of which the first fails on one rank alone."""
    if place.rank > 1:
        return {}
    pair = CompressedAllReduce((0, 1), torch.device("cpu"), QUICK_S)
    said = []
    for number in range(3):
        fails = number == 0 and place.rank == 0
        values = torch.full((40,), FAULT if fails else 10.0 * number + place.rank)
        work = pair.begin("all", values, lambda: Faulty("float32"))
        try:
            said.append(work.future.wait().unique().tolist())
        except Exception as error:
            said.append(type(error).__name__)
    pair.close()
    return {"said": said}


for _function in (feedback, checkpoint, forgetting, broken):
    numbered(4)(_function)

if __name__ == "__main__":
    main(["allreduce"], sys.argv[1].split(",") if len(sys.argv) > 1 else ())
