"""The all-reduce of encoded values, compared with one process that has all ranks' values."""

import copy
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from codec_cases import normal
from codec_training import bits, same
from paceline import ddp_hook
from paceline.codecs.codec import Cast, Codec, Payload
from paceline.codecs.names import find_codec
from paceline.exchange import compressed
from paceline.exchange.compressed import CodecAllReduce, Work
from pair import Ranks
from replicas import parallel_of

PIECE, HEADER = 1 << 13, 40
SENT = (70_001, PIECE + 17)  # lengths for which the bytes sent are checked
LENGTHS = (0, 1, 2, 3, 5, 1023, 1025, *SENT)
FAULT = 123.0
# One codec for each path of an exchange.
PATHS = ("dynamic8", "e3m0", "dynamic4+feedback", "half", "onebit", "threshold:0.5", "float32")


def made(name: str) -> Codec:
    return Cast("float32") if name == "float32" else find_codec(name)


@contextmanager
def all_reduce() -> Iterator[CodecAllReduce]:
    """Create an all-reduce with short pieces."""
    before, compressed.PIECE = compressed.PIECE, PIECE
    found = CodecAllReduce("half", range(dist.get_world_size()), torch.device("cpu"), 20.0)
    yield found
    found.close()
    compressed.PIECE = before


class Oracle:
    """Computes the expected means in one process, which encodes for all ranks."""

    def __init__(self, make: Callable[[], Codec]) -> None:
        self._make, self._size = make, dist.get_world_size()
        self._codecs: dict[tuple[object, ...], Codec] = {}

    def mean(self, key: str, values: list[Tensor]) -> Tensor:
        """Return the mean of the ranks' values, piece by piece and shard by shard."""
        means = torch.empty_like(values[0])
        for begin in range(0, len(means), PIECE):
            count = min(PIECE, len(means) - begin)
            if not self._make().encodes_sums:
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
        """Encode and decode values with a rank's codec for this shard."""
        codec = self._codecs.setdefault(place, self._make())
        return codec.decode(codec.encode(values))


def values_of(rank: int, step: int, count: int) -> Tensor:
    """Return values with a different magnitude in each block, different by rank and step."""
    values = normal(count, 1 + 1000 * rank + 100 * step + count % 97)
    return values * torch.logspace(-2, 1, -(-count // 700)).repeat_interleave(700)[:count]


def right_means(name: str) -> tuple[list[int], str]:
    """Run two steps with all lengths at once; return bytes sent, and all bits."""

    def make() -> Codec:
        return made(name)

    rank, size, oracle = dist.get_rank(), dist.get_world_size(), Oracle(make)
    every: list[Tensor] = []
    order: list[str] = []
    ends: list[str] = []
    with all_reduce() as reduce:
        for step in range(2):
            works = []
            for count in LENGTHS:
                work = reduce.begin(f"{name}{count}", values_of(rank, step, count), make, size)
                order.append(work.key)
                work.future.then(lambda _, key=work.key: ends.append(key))
                works.append(work)
            found = [work.future.wait() for work in works]
            every += found
            for count, means in zip(LENGTHS, found if rank == 0 else (), strict=False):
                values = [values_of(other, step, count) for other in range(size)]
                expected = oracle.mean(f"{name}{count}", values)
                assert torch.equal(means.view(torch.int32), expected.view(torch.int32)), count
        sent = []
        for count in SENT:
            before = reduce.bytes_sent
            work = reduce.begin(f"{name}{count}", values_of(rank, 2, count), make, size)
            work.future.wait()
            sent.append(reduce.bytes_sent - before)
    assert ends == order  # callbacks ran in the order of the exchanges
    return sent, bits(every)


@pytest.mark.parametrize("place", ["pair", pytest.param("triple", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PATHS)
def test_means_are_those_of_one_process_bit_for_bit(ranks: Ranks, name: str):
    sent, _ = same(ranks(right_means, name))
    if name.startswith("threshold"):  # its bytes depend on the values
        return
    codec, size = made(name), ranks.size
    for count, nbytes in zip(SENT, sent, strict=True):
        pieces, times = [min(PIECE, count - begin) for begin in range(0, count, PIECE)], 1
        if codec.encodes_sums:  # each shard is sent to its owner, and its mean to all
            pieces, times = [-(-piece // size) for piece in pieces], 2
        rows = [HEADER + 8 * -(-codec.nbytes(piece) // 8) for piece in pieces]
        assert nbytes == times * (size - 1) * sum(rows)


def chains(name: str) -> list[str]:
    """Run further steps with the current, the restored and no error feedback; return their bits."""
    size, count = dist.get_world_size(), PIECE + 301

    def run(reduce: CodecAllReduce, steps: range) -> Iterator[Tensor]:
        for step in steps:
            reduce.begin_step()
            values = values_of(dist.get_rank(), step, count)
            yield reduce.begin("all", values, lambda: made(name), size).future.wait()

    with all_reduce() as reduce:
        bits(run(reduce, range(4)))
        state = reduce.codecs.state_dict()
        found = [bits(run(reduce, range(4, 8)))]
        for loaded in (state, {}):
            reduce.codecs.load_state_dict(loaded)
            found.append(bits(run(reduce, range(4, 8))))
    return found


@pytest.mark.parametrize("name", ["onebit", "threshold:0.5", "dynamic4+feedback"])
def test_error_feedback_is_in_the_state(pair: Ranks, name: str):
    going_on, loaded, without = same(pair(chains, name))
    assert loaded == going_on
    assert without != going_on


def remembered() -> list[list[str]]:
    """Return the keys with error feedback after each step; "c!" has a NaN on rank 1."""
    found = []
    with all_reduce() as reduce:
        for used in (("a", "b"), ("a",), ("a", "c!"), ("a",), ()):
            reduce.begin_step()
            for key in used:
                values = values_of(dist.get_rank(), 0, 100)
                if key == "c!" and dist.get_rank() == 1:
                    values[7] = torch.nan
                means = reduce.begin(key, values, lambda: made("onebit"), 2.0).future.wait()
                assert means.isnan().all() if key == "c!" else means.isfinite().all()
            found.append(sorted({key.partition("/")[0] for key in reduce.codecs.state_dict()}))
    return found


def test_error_feedback_is_dropped_after_a_step_without_its_key_or_with_nan(pair: Ranks):
    assert same(pair(remembered)) == [["a", "b"], ["a", "b"], ["a", "c!"], ["a"], ["a"]]


class Faulty(Cast):
    """A codec that fails on request."""

    def encode(self, values: Tensor) -> Payload:
        if values.numel() and bool((values == FAULT).any()):
            raise ValueError("this cannot be encoded")
        return super().encode(values)


def broken() -> list[str]:
    """Run three exchanges of one size; the first fails on one rank only."""
    reduce = CodecAllReduce("half", (0, 1), torch.device("cpu"), 2.0)
    kinds = []
    for number in range(3):
        fails = number == 0 and dist.get_rank() == 0
        values = torch.full((40,), FAULT if fails else 10.0 * number + dist.get_rank())
        work = reduce.begin("all", values, lambda: Faulty("float32"))
        try:
            kinds.append(str(work.future.wait().unique().tolist()))
        except Exception as error:
            kinds.append(type(error).__name__)
    reduce.close()
    return kinds


def test_exchanges_after_one_that_failed_on_one_rank_fail_too(pair: Ranks):
    """With equal sizes, a rank that continued would mix its second exchange with the first."""
    assert pair(broken) == [["ValueError"] * 3, ["RuntimeError"] * 3]


def test_both_threads_may_fail_at_once():
    """A lost rank fails both; later exchanges would wait forever for a thread that ended."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            for _ in range(300):
                work = Work("", torch.empty(0), lambda: None, 1.0, torch.futures.Future(), None)
                both = threading.Barrier(2)

                def fail(_: int, work: Work = work, both: threading.Barrier = both) -> None:
                    call: Future[None] = Future()
                    call.set_exception(ValueError("lost"))
                    both.wait()
                    work.failed_with(call)

                list(threads.map(fail, range(2)))  # raises errors of the threads
                with pytest.raises(ValueError, match="lost"):
                    work.future.wait()
    finally:
        sys.setswitchinterval(interval)


def hooked(bad_rank: int | None) -> tuple[bool, int, float]:
    """Return whether "auto" gives DDP's gradients, the number of NaN values, and the bytes sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(300, 40)
    plain, tried = (DistributedDataParallel(copy.deepcopy(model)) for _ in range(2))
    state, hook = ddp_hook("auto", on_nonfinite="skip")
    tried.register_comm_hook(state, hook)
    is_same = True
    for step in range(3):
        inputs = values_of(rank, step, 300 * 4).view(4, 300)
        if rank == bad_rank and step == 1:
            inputs[0, 0] = torch.nan
        for one in (plain, tried):
            one.zero_grad()
            one(inputs).sum().backward()
        pairs = zip(plain.parameters(), tried.parameters(), strict=True)
        is_same &= all(torch.equal(a.grad.nan_to_num(), b.grad.nan_to_num()) for a, b in pairs)
    found = is_same, state.num_nonfinite, state.bytes_sent * size / (2 * (size - 1))
    state.close()
    return found


def test_without_a_codec_auto_averages_as_ddp_does(pair: Ranks):
    """The second call has a NaN in rank 1's inputs, which reaches 40 weight gradients."""
    nbytes = 3 * 4 * (300 * 40 + 40)
    assert pair(hooked, None) == [(True, 0, nbytes)] * 2
    assert pair(hooked, 1) == [(True, 40, nbytes)] * 2


def closed(codec: str | None, exchange: str) -> list[int]:
    """Train and close an exchange several times; return the numbers of open descriptors."""
    found = []
    for _ in range(3):
        parallel = parallel_of(nn.Linear(6, 6), exchange, codec=codec)
        parallel(torch.ones(4, 6)).sum().backward()
        parallel.close()
        del parallel
        gc.collect()
        found.append(len([*Path("/proc/self/fd").iterdir()]))
    return found


@pytest.mark.parametrize("codec", [None, "dynamic8"])
@pytest.mark.parametrize("exchange", ["allreduce", "host"])
def test_a_closed_exchange_keeps_no_connections(pair: Ranks, codec: str | None, exchange: str):
    for _, second, third in pair(closed, codec, exchange):
        assert third <= second  # fewer if connections of earlier tests have just been closed
