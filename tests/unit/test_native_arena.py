"""The native arena in one process: indices and sizes are checked, those in shared memory too."""

import mmap
import os
import struct
from collections.abc import Iterator

import pytest
import torch

from paceline.native import Arena, DType, Fault, Goal, Status, arena_nbytes

SLOT_NBYTES, MAX_CHUNKS = 4096, 8
VALUES = 64  # of a chunk, in float32
READY_OFFSET = 128  # of the word that counts chunks which all ranks have posted


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("arena")
    os.truncate(fd, arena_nbytes(2, SLOT_NBYTES, MAX_CHUNKS, 0))
    yield fd
    os.close(fd)


def opened(fd: int, num_chunks: int, num_ranks: int = 1) -> Arena:
    options = (1.0, False, False, False, False)
    arena = Arena(fd, 0, num_ranks, SLOT_NBYTES, MAX_CHUNKS, 0, *options)
    arena.set_chunks([[(4 * VALUES * i, VALUES, DType.FLOAT32)] for i in range(num_chunks)])
    return arena


def result(arena: Arena, step: int) -> list[float]:
    return torch.from_numpy(arena.shared_result(step % 2)).view(torch.float32).tolist()


def fill(arena: Arena) -> list[float]:
    values = torch.arange(SLOT_NBYTES / 4)
    torch.from_numpy(arena.slot(0)).view(torch.float32).copy_(values)
    return values.tolist()


def test_a_chunk_that_is_not_set_is_refused(file: int):
    arena = opened(file, num_chunks=1, num_ranks=2)
    arena.begin(1)
    for chunk in (1, 5, MAX_CHUNKS):
        with pytest.raises(IndexError):
            arena.post(chunk)
        with pytest.raises(IndexError):
            arena.wait(Goal.CHUNK, 1, chunk)
        with pytest.raises(IndexError):
            arena.missing(Goal.CHUNK, 1, chunk)
        with pytest.raises(IndexError):
            arena.times(chunk)


def test_a_rank_that_is_not_there_is_refused(file: int):
    arena, source = opened(file, num_chunks=1), torch.ones(4)
    for call in (
        lambda: arena.slot(1),
        lambda: arena.copy_in(1, [(0, source.data_ptr(), source.nbytes)]),
        lambda: arena.give_up(1, Fault.DIED),
    ):
        with pytest.raises(IndexError):
            call()


def test_a_chunk_of_another_process_alone_is_left_to_that_process(file: int):
    """Both are rank 0, so that a chunk which one has posted is ready for the other, too."""
    few, many = opened(file, num_chunks=1), opened(file, num_chunks=5)
    values = fill(many)
    for arena in (few, many):
        arena.begin(1)
    many.post(4)
    assert few.wait(Goal.STEP, 1, 0) is Status.PENDING
    many.post(0)
    assert few.wait(Goal.CHUNK, 1, 0) is Status.REACHED
    assert many.wait(Goal.CHUNK, 1, 4) is Status.REACHED
    found = result(many, 1)
    for chunk in (0, 4):
        place = slice(VALUES * chunk, VALUES * (chunk + 1))
        assert found[place] == values[place]


def test_an_overwritten_count_of_chunks_is_no_index(file: int):
    arena, memory = opened(file, num_chunks=2), mmap.mmap(file, 0)
    arena.begin(1)
    memory[READY_OFFSET : READY_OFFSET + 8] = struct.pack("<Q", 1 << 32 | 2**30)
    arena.post(0)
    assert arena.wait(Goal.STEP, 1, 0) is Status.PENDING


def test_a_file_that_is_too_short_is_refused(file: int):
    os.truncate(file, arena_nbytes(2, SLOT_NBYTES, MAX_CHUNKS, 0) - 1)
    with pytest.raises(RuntimeError, match="short"):
        opened(file, num_chunks=1, num_ranks=2)


@pytest.mark.parametrize("place", range(4))
def test_sizes_that_overflow_are_refused(file: int, place: int):
    sizes = [2, SLOT_NBYTES, MAX_CHUNKS, 0]
    sizes[place] = 2**63
    with pytest.raises(ValueError, match="larger"):
        arena_nbytes(*sizes)
    with pytest.raises(ValueError, match="larger"):
        Arena(file, 0, *sizes, 1.0, False, False, False, False)
