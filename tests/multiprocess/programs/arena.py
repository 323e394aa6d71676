"""One rank of a test of the arena: `arena.py SCENARIO [ARGUMENT]`; each prints one JSON line."""

import ctypes
import gc
import hashlib
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from arena_parts import (
    CHUNKS,
    SEGMENTS,
    check,
    deliver,
    gradient,
    mean,
    opened,
    part,
    say,
    take_step,
)

from paceline.core.errors import PacelineError
from paceline.links.arena import Arena
from paceline.links.group import Group
from paceline.links.rendezvous import process_group
from paceline.native import die_with_parent

CLONE_NEWPID = 0x20000000
DESCRIPTORS = Path("/proc/self/fd")


def steps(group: Group, threads: str) -> None:
    """Many steps, with delays and an order of chunks that no two ranks share."""
    arena, digest = opened(group, threads=int(threads)), hashlib.sha256()
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
    say(digest=digest.hexdigest(), members=arena.members, leaders=arena.leaders)


def held(group: Group, _: str) -> None:
    """The first rank doubles the sums in place, chunk by chunk, before the step is complete."""
    arena = opened(group, held=True)

    def double(step: int) -> None:
        for chunk in range(len(CHUNKS)):
            arena.wait_chunk(chunk)
            for index in CHUNKS[chunk]:
                part(arena.shared_result(step), SEGMENTS[index]).mul_(2)
            time.sleep(1e-3)
            arena.publish(chunk)

    for step in range(1, 11):
        arena.begin(step)
        thread = threading.Thread(target=double, args=[step])
        if group.rank == 0:
            thread.start()
        for chunk in range(len(CHUNKS)):
            deliver(arena, group.rank, step, chunk)
        arena.commit()
        arena.wait_step()
        check(arena, group.world_size, step, factor=2)
        if group.rank == 0:
            thread.join()
    say(done=True)


def fault(group: Group, kind: str) -> None:
    """Rank 1 is killed or stopped, or just idle, while the others wait for it in some way."""
    how, goal = kind.split("-")
    arena = opened(group, deadline_s=600 if how == "killed" else 1)
    take_step(arena, group.rank, 1)
    arena.begin(2)
    group.barrier()
    if group.rank == 1:
        if goal == "drain":
            time.sleep(0.2)  # until the others are in it
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    started = time.monotonic()
    try:
        if goal == "drain":
            arena.discard()
        elif goal == "chunk":
            deliver(arena, group.rank, 2, 0)
            arena.wait_chunk(0)
        else:
            for chunk in range(len(CHUNKS)):
                deliver(arena, group.rank, 2, chunk)
            arena.commit()
            arena.wait_step()
    except PacelineError as error:
        took = time.monotonic() - started
        say(error=type(error).__name__, text=str(error), took_s=took, pid=group.members[1].pid)
    arena.close()
    time.sleep(0.5)  # the others, too, speak before the launcher ends them
    os._exit(1)


def discarded(group: Group, _: str) -> None:
    """In every other step some rank's backward pass fails, after any number of chunks."""
    arena, dice, said = opened(group), random.Random(7), []
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
                arena.discard()  # a second time does nothing
                continue
            if goal == "commit":
                time.sleep(2e-3)
            arena.commit()
            arena.wait_step()
        except PacelineError as error:
            assert culprits, error
            said.append([type(error).__name__, str(error), step, culprits])
            try:
                arena.commit()
            except PacelineError as again:
                assert again is error
        else:
            assert not culprits
            check(arena, group.world_size, step)
    say(said=said, pids=[member.pid for member in group.members])


def no_memory(group: Group, how: str) -> None:
    """The first rank may not have so much, or nobody could."""
    if how == "limit" and group.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    before = len(list(DESCRIPTORS.iterdir()))
    try:
        Arena(group, 1 << (22 if how == "limit" else 50), 8, 3, 30)
    except PacelineError as error:
        say(error=type(error).__name__, text=str(error))
    assert len(list(DESCRIPTORS.iterdir())) == before


def private(group: Group, _: str) -> None:
    """What one rank writes to its view of the result, no other sees; and it can be undone."""
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
    say(rank=group.rank, pages=pages)


def memory(group: Group, _: str) -> None:
    """What is open and mapped while the arena lives, and when it is gone."""

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

    others = traces()[1]
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
    say(others=others, first=first, closed=closed, gone=traces(), named=named)


def interrupted(group: Group, _: str) -> None:
    """A signal that comes to a waiting rank is served at once."""

    def ring(*_: object) -> None:
        raise TimeoutError

    arena = opened(group)
    arena.begin(1)
    if group.rank == 0:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            deliver(arena, group.rank, 1, 0)
            arena.wait_chunk(0)
        except TimeoutError:
            say(served=True)
        arena.discard()
    else:
        time.sleep(0.5)
        arena.discard()


def another_namespace(group: Group, _: str) -> None:
    """The second rank knows its processes by other numbers: it is a machine of its own."""
    arena = opened(group)
    arena.begin(1)
    for chunk in range(len(CHUNKS)):
        deliver(arena, group.rank, 1, chunk)
    arena.commit()
    for chunk in range(len(CHUNKS)):
        arena.wait_chunk(chunk)
        arena.publish(chunk)
    arena.wait_step()
    wanted = (gradient(group.rank, 1, 1) * 0.5).tolist()
    assert part(arena.shared_result(1), SEGMENTS[1]).tolist() == wanted
    say(rank=group.rank, members=arena.members, leaders=arena.leaders)


def enter_namespace() -> None:
    """Go on in a child that has a PID namespace of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) != 0:
        say(refused=os.strerror(ctypes.get_errno()))
        os._exit(0)
    child = os.fork()
    if child != 0:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    die_with_parent(0)


if __name__ == "__main__":
    scenario, argument = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    if scenario == "another_namespace" and os.environ["RANK"] == "1":
        enter_namespace()
    with process_group(60) as place:
        globals()[scenario](place, argument)
        place.barrier()
    os._exit(0)
