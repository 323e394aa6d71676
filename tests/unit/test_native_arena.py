"""An arena in one process: checks of indices and sizes, memory, the summing thread."""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator

import pytest
import torch

from absent_ranks import group_of
from paceline.core.errors import InvalidInput
from paceline.links import arena as links
from paceline.links.shared_memory import allocate, choose_leaders
from paceline.native import Arena, DType, Fault, Goal, Status, arena_nbytes

SLOT_NBYTES, MAX_CHUNKS = 4096, 8
VALUES = 64  # float32 values of a chunk
READY_OFFSET = 128  # of the counter of chunks that all ranks have posted


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("arena")
    os.truncate(fd, arena_nbytes(2, SLOT_NBYTES, MAX_CHUNKS, 0))
    yield fd
    os.close(fd)


def opened(fd: int, num_chunks: int, num_ranks: int = 1) -> Arena:
    options = (1.0, False, False, False)
    arena = Arena(fd, 0, num_ranks, SLOT_NBYTES, MAX_CHUNKS, 0, *options)
    arena.set_chunks([[(4 * VALUES * i, VALUES, DType.FLOAT32)] for i in range(num_chunks)])
    return arena


def result(arena: Arena, step: int) -> list[float]:
    return torch.from_numpy(arena.shared_result(step % 2)).view(torch.float32).tolist()


def fill(arena: Arena) -> list[float]:
    values = torch.arange(SLOT_NBYTES / 4)
    torch.from_numpy(arena.slot(0)).view(torch.float32).copy_(values)
    return values.tolist()


def test_a_chunk_that_is_not_set_and_a_rank_that_is_not_there_are_refused(file: int):
    arena, source = opened(file, num_chunks=1, num_ranks=2), torch.ones(4)
    arena.begin(1)
    parts = [(0, source.data_ptr(), source.nbytes)]
    calls = [(arena.slot, 2), (arena.copy_in, 2, parts), (arena.give_up, 2, Fault.DIED)]
    for chunk in (1, 5, MAX_CHUNKS):
        calls += [(arena.post, chunk), (arena.times, chunk)]
        calls += [(one, Goal.CHUNK, 1, chunk) for one in (arena.wait, arena.missing)]
    for call, *arguments in calls:
        with pytest.raises(IndexError):
            call(*arguments)


def test_a_chunk_that_only_another_process_has_is_left_to_that_process(file: int):
    """Both arenas are rank 0, so a chunk posted by one is ready for the other."""
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
    with pytest.raises(ValueError, match="bytes or more"):
        arena_nbytes(*sizes)
    with pytest.raises(ValueError, match="bytes or more"):
        Arena(file, 0, *sizes, 1.0, False, False, False)


@pytest.mark.parametrize(
    ("reached", "leaders"),
    [
        ([[], [0], [0, 1]], [0, 0, 0]),
        ([[], [], [0], [1]], [0, 1, 0, 1]),
        ([[], [0], [1]], [0, 0, 2]),  # rank 1 leads nobody, though rank 2 reaches it
    ],
)
def test_all_ranks_choose_the_same_leaders(reached, leaders):
    assert choose_leaders(reached) == leaders


def test_the_memory_is_private_has_no_name_and_keeps_its_size():
    fd = allocate(1 << 16)
    try:
        status = os.fstat(fd)
        assert (status.st_mode & 0o777, status.st_nlink, status.st_size) == (0o600, 0, 1 << 16)
        assert status.st_blocks * 512 >= 1 << 16  # allocated, not only reserved
        for size in (0, 1 << 17):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    finally:
        os.close(fd)
    with pytest.raises(InvalidInput) as caught:
        allocate(1 << 50)
    assert f"{1 << 50:,}" in caught.value.problem


def test_a_late_thread_finds_nothing_to_sum_in_new_chunks():
    arena = links.Arena(group_of(), 4_000_000, 1, 0, 5)
    arena.set_chunks([[(0, 16, torch.float32)]])
    arena.begin(1)
    arena.post(0)
    arena.commit()
    arena.wait_step()
    arena.slot.view(torch.float32).fill_(1.0)
    arena.set_chunks([[(0, 1_000_000, torch.float32)]])
    # A step without a fault is never drained: waiting for it only looks for work.
    assert arena._native.wait(Goal.DRAINED, 1, 0) is Status.PENDING
    assert not arena.shared_result(1).any()
    arena.close()
