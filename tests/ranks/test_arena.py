"""The arena: shared memory in which ranks sum their gradients."""

import ctypes
import functools
import gc
import hashlib
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arena_steps import (
    CHUNKS,
    SEGMENTS,
    check,
    deliver,
    deliver_all,
    gradient,
    mean,
    opened,
    part,
    take_step,
)
from paceline.core.errors import InvalidInput, StepDiscarded, WorkerLost
from paceline.links.arena import Arena
from paceline.links.forkserver import die_with_parent
from paceline.links.group import Group
from paceline.links.rendezvous import process_group
from pair import Ranks

CLONE_NEWPID = 0x20000000
DESCRIPTORS = Path("/proc/self/fd")
SLOT_NBYTES = 1 << 22


def in_a_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function on a rank, with a Paceline group as its first argument."""

    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        with process_group(60) as group:
            result = function(group, *args)
            group.barrier()
            return result

    return inside


@in_a_group
def steps(group: Group) -> tuple[str, list[int], list[int]]:
    """Sum 40 steps, with random delays and a random order of chunks on each rank."""
    arena, digest = opened(group), hashlib.sha256()
    dice = random.Random(group.rank)
    for step in range(1, 41):
        arena.begin(step)
        order = dice.sample(range(len(CHUNKS)), len(CHUNKS))
        for chunk in order:
            if dice.random() < 0.2:
                time.sleep(dice.random() * 3e-3)
            deliver(arena, group.rank, step, chunk)
        arena.flags[arena.local_rank, :, step % 2] = group.rank + step
        arena.commit()
        if dice.random() < 0.5:
            chunk = order[0]
            arena.wait_chunk(chunk)
            posted, complete = arena.times(chunk)
            assert 0 < posted <= complete <= time.monotonic()
        arena.wait_step()
        flags = [[rank + step] * 3 for rank in range(group.world_size)]
        assert arena.flags[..., step % 2].tolist() == flags
        check(arena, group.world_size, step)
        digest.update(arena.shared_result(step).numpy())
    return digest.hexdigest(), list(arena.members), list(arena.leaders)


@pytest.mark.parametrize("place", ["pair", "triple"])
def test_ranks_get_the_bits_of_torch_in_any_order_of_chunks(ranks: Ranks):
    first, *others = ranks(steps, group=False)
    assert others == [first] * (ranks.size - 1)
    assert first[1:] == (list(range(ranks.size)), [0])


@in_a_group
def held(group: Group) -> None:
    """Double each chunk's sums in place on rank 0 before the step is complete."""
    arena = opened(group, held=True)

    def double(step: int) -> None:
        for chunk in range(len(CHUNKS)):
            arena.wait_chunk(chunk)
            for index in CHUNKS[chunk]:
                part(arena.shared_result(step), SEGMENTS[index]).mul_(2)
            time.sleep(1e-3)
            arena.publish()

    for step in range(1, 11):
        arena.begin(step)
        thread = threading.Thread(target=double, args=[step])
        if group.rank == 0:
            thread.start()
        deliver_all(arena, group.rank, step)
        arena.wait_step()
        check(arena, group.world_size, step, factor=2)
        if group.rank == 0:
            thread.join()


def test_a_held_step_waits_until_its_chunks_are_published(pair: Ranks):
    pair(held, group=False)


def wait_for(goal: str, arena: Arena, rank: int) -> None:
    if goal == "drain":
        arena.discard()
    elif goal == "chunk":
        deliver(arena, rank, 2, 0)
        arena.wait_chunk(0)
    else:
        deliver_all(arena, rank, 2)
        arena.wait_step()


def fault(is_killed: bool, goal: str) -> tuple[str, str]:
    """Kill or stop rank 1; return the error and rank 1's name."""
    with process_group(60) as group:
        arena = opened(group, deadline_s=600 if is_killed else 1)
        take_step(arena, group.rank, 1)
        arena.begin(2)
        group.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if is_killed else signal.SIGSTOP)
        with pytest.raises(WorkerLost) as caught:
            wait_for(goal, arena, group.rank)
        arena.close()
        group.store.set(f"lost/{group.rank}", "")
        group.store.wait(["lost/0", "lost/2"])
        pid = group.members[1].pid
        if group.rank == 0 and not is_killed:
            os.kill(pid, signal.SIGKILL)
        return str(caught.value), f"worker 1 (process {pid})"


@pytest.mark.parametrize("goal", ["step", "chunk", "drain"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_all_waiting_ranks_name_the_lost_rank(triple: Ranks, is_killed: bool, goal: str):
    """They name a killed rank immediately, and a stopped one at the deadline."""
    first, died, last = triple(fault, is_killed, goal, group=False, errors=True)
    assert died.kind == "Died"
    for text, named in (first, last):
        assert named in text
        assert ("step 2" in text) == (not is_killed)


@in_a_group
def discarded(group: Group) -> int:
    """Fail the backward pass of random ranks, after a random number of chunks."""
    arena, dice, num_discarded = opened(group), random.Random(7), 0
    for step in range(1, 31):
        culprits = dice.sample(range(group.world_size), dice.choice([0, 1, 1, 2]))
        fails_after = dice.randrange(len(CHUNKS))
        goal = dice.choice(["chunk", "commit", "step"])
        arena.begin(step)
        try:
            for chunk in range(len(CHUNKS)):
                if group.rank in culprits and chunk == fails_after:
                    break
                deliver(arena, group.rank, step, chunk)
                if goal == "chunk" and chunk == len(CHUNKS) - 1:
                    arena.wait_chunk(chunk)
            if group.rank in culprits:
                arena.discard()
                arena.discard()  # a second call has no effect
                continue
            if goal == "commit":
                time.sleep(2e-3)
            arena.commit()
            arena.wait_step()
        except StepDiscarded as error:
            named = [f"worker {rank} (process {group.members[rank].pid})" for rank in culprits]
            assert any(name in str(error) for name in named)
            assert f"step {step} " in str(error)
            try:
                arena.commit()
            except StepDiscarded as again:
                assert again is error
            num_discarded += 1
        else:
            assert not culprits
            check(arena, group.world_size, step)
    return num_discarded


def test_a_step_that_fails_anywhere_is_discarded_everywhere(triple: Ranks):
    assert max(triple(discarded, group=False)) > 0


@in_a_group
def no_memory(group: Group) -> str:
    """Request more memory than the first rank's limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    before = len(list(DESCRIPTORS.iterdir()))
    with pytest.raises(InvalidInput) as caught:
        Arena(group, SLOT_NBYTES, 8, 3, 30)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(list(DESCRIPTORS.iterdir())) == before
    return str(caught.value)


def test_memory_that_cannot_be_had_is_an_error_on_every_rank(triple: Ranks):
    (text,) = set(triple(no_memory, group=False))
    nbytes = int(re.search(r"([\d,]+) bytes", text)[1].replace(",", ""))
    slots = 5 * SLOT_NBYTES  # three of ranks, and two results
    assert slots < nbytes < slots + (1 << 20)


@in_a_group
def private(group: Group) -> list[int]:
    """Write to a rank's private view of the result; `refresh` undoes the writes."""
    arena = opened(group)
    pages = []
    for step in range(1, 7):
        take_step(arena, group.rank, step)
        pages.append(arena.refresh(step))
        view = part(arena.result(step), SEGMENTS[1])
        wanted = mean(group.world_size, step, 1)
        assert torch.equal(view, wanted)
        if group.rank == 0:
            view.mul_(3)
        elif group.rank == 1:
            view[5000] = -1  # one page
        group.barrier()
        check(arena, group.world_size, step)
        changed = {0: wanted * 3, 1: wanted.clone()}.get(group.rank, wanted)
        if group.rank == 1:
            changed[5000] = -1
        assert torch.equal(view, changed)
    return pages


def test_writes_to_a_result_are_private_and_undone(triple: Ranks):
    said, page = triple(private, group=False), os.sysconf("SC_PAGESIZE")
    assert (said[2], said[1], said[0][:2]) == ([0] * 6, [0, 0] + [page] * 4, [0, 0])
    assert all(0 <= nbytes - 4 * 200_001 < 2 * page for nbytes in said[0][2:])


@in_a_group
def open_and_mapped(group: Group) -> list[list[int]]:
    """Count an arena's files, mappings and threads while it is open, closed and deleted."""

    def traces() -> list[int]:
        opened_files = [str(path.readlink()) for path in DESCRIPTORS.iterdir() if path.exists()]
        mapped = Path("/proc/self/maps").read_text().count("/memfd:paceline (deleted)")
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        return [
            sum("memfd" in name for name in opened_files if name),
            sum("pidfd" in name for name in opened_files if name),
            mapped,
            names.count("paceline-sum"),
        ]

    before = traces()
    arena = opened(group)
    take_step(arena, group.rank, 1)
    first, kept = traces(), arena.result(1)
    named = "/dev/shm" in Path("/proc/self/maps").read_text()
    second = opened(group)  # several arenas may live in one process
    take_step(second, group.rank, 1)
    child = os.fork()
    if child == 0:
        arena.close()
        second.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    take_step(arena, group.rank, 2)
    arena.close()
    arena.close()
    del second
    gc.collect()
    closed = traces()
    assert torch.equal(part(kept, SEGMENTS[0]), mean(group.world_size, 1, 0))
    del kept
    gc.collect()
    assert not named
    return [
        [one - other for one, other in zip(counts, before, strict=True)]
        for counts in (first, closed, traces())
    ]


def test_an_arena_leaves_nothing_open_mapped_or_running(pair: Ranks):
    for first, closed, gone in pair(open_and_mapped, group=False):
        assert first == [0, 1, 2, 1]  # memory, peers, mappings, threads
        assert closed == [0, 0, 1, 0]  # `kept` still maps the result
        assert gone == [0, 0, 0, 0]


@in_a_group
def interrupted(group: Group) -> None:
    """Send a signal to a waiting rank, which must handle it immediately."""

    def ring(*_: object) -> None:
        raise TimeoutError

    arena = opened(group)
    arena.begin(1)
    if group.rank == 0:
        before = signal.signal(signal.SIGALRM, ring)
        deliver(arena, group.rank, 1, 0)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            arena.wait_chunk(0)
        signal.signal(signal.SIGALRM, before)
        group.store.set("served", "")
    group.store.wait(["served"])
    arena.discard()


def test_a_waiting_rank_handles_signals(pair: Ranks):
    pair(interrupted, group=False)


@in_a_group
def another_machine(group: Group) -> tuple[list[int], list[int]]:
    arena = opened(group)
    arena.begin(1)
    deliver_all(arena, group.rank, 1)
    for chunk in range(len(CHUNKS)):
        arena.wait_chunk(chunk)
        arena.publish()
    arena.wait_step()
    wanted = (gradient(group.rank, 1, 1) * 0.5).tolist()
    assert part(arena.shared_result(1), SEGMENTS[1]).tolist() == wanted
    return list(arena.members), list(arena.leaders)


def in_another_namespace(file: Path) -> tuple[list[int], list[int]] | None:
    """Continue rank 1 in a child process with a new PID namespace."""
    if os.environ["RANK"] == "0":
        return another_machine()
    child = os.fork()
    if child == 0:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) != 0:
            os._exit(3)
        grandchild = os.fork()
        if grandchild != 0:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) & 0xFF)
        die_with_parent(0)
        torch.save(another_machine(), file)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return torch.load(file)


def test_a_rank_in_another_pid_namespace_counts_as_another_machine(pair: Ranks, tmp_path: Path):
    libc = ctypes.CDLL(None)
    child = os.fork()
    if child == 0:
        os._exit(libc.unshare(CLONE_NEWPID) & 0xFF)
    if os.waitpid(child, 0)[1] != 0:
        pytest.skip("no new PID namespace")
    found = pair(in_another_namespace, tmp_path / "found.pt", group=False)
    assert found == [([0], [0, 1]), ([1], [0, 1])]
