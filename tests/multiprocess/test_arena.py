"""The memory in which ranks sum their gradients, with real processes."""

import fcntl
import json
import os
from pathlib import Path

import pytest
import torch

from groups import group_of
from paceline.core.errors import InvalidInput
from paceline.links.arena import Arena, Segment
from paceline.links.shared_memory import allocate, choose_leaders
from paceline.native import Goal, Status

PROGRAM = Path(__file__).parent / "programs" / "arena.py"
LAUNCH = """
import sys
from paceline.core.errors import PacelineError
from paceline.links.launch import launch
try:
    launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]))
except PacelineError as error:
    sys.exit(str(error))
"""


def run(start, num_ranks: int, *arguments: str, code: int = 0) -> list[dict]:
    done = start("-c", LAUNCH, str(num_ranks), str(PROGRAM), *arguments).finish()
    assert done.code == code, done.err
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.parametrize(("num_ranks", "threads"), [(1, 1), (2, 0), (2, 1), (3, 1)])
def test_all_ranks_get_the_bits_of_torch_in_any_order_of_chunks(start, num_ranks, threads):
    said = run(start, num_ranks, "steps", str(threads))
    assert len(said) == num_ranks
    assert all(row == said[0] for row in said)
    assert said[0]["members"] == list(range(num_ranks))
    assert said[0]["leaders"] == [0]


def test_a_held_step_waits_until_its_chunks_are_published(start):
    assert run(start, 2, "held") == [{"done": True}] * 2


@pytest.mark.parametrize("goal", ["step", "chunk", "drain"])
def test_a_killed_rank_is_named_at_once_by_all_that_wait(start, goal: str):
    said = run(start, 3, "fault", f"killed-{goal}", code=1)
    assert len(said) == 2
    for row in said:
        assert row["error"] == "WorkerLost"
        assert row["text"] == f"worker 1 (process {row['pid']}) died in the middle of the run"
        assert row["took_s"] < 300


@pytest.mark.parametrize("goal", ["step", "chunk", "drain"])
def test_a_stopped_rank_is_named_at_the_deadline_by_all_that_wait(start, goal: str):
    missing = (
        "left step 2, which is discarded,"
        if goal == "drain"
        else "delivered its gradients of step 2"
    )
    said = run(start, 3, "fault", f"stopped-{goal}", code=1)
    assert len(said) == 2
    for row in said:
        assert row["error"] == "WorkerLost"
        name = f"worker 1 (process {row['pid']})"
        assert row["text"] == f"{name} does not answer: it has not {missing} within 1 s"
        assert 0.5 < row["took_s"] < 60


def test_a_step_that_fails_anywhere_is_discarded_everywhere_and_the_next_one_is_right(start):
    said = run(start, 3, "discarded")
    assert len(said) == 3
    assert any(row["said"] for row in said)
    for row in said:
        for error, text, step, culprits in row["said"]:
            assert error == "StepDiscarded"
            named = [f"worker {rank} (process {row['pids'][rank]})" for rank in culprits]
            begin = f"step {step} is discarded on all workers: it failed on "
            assert text in [begin + name for name in named]


@pytest.mark.parametrize(("how", "needed"), [("limit", 2), ("machine", 50)])
def test_memory_that_cannot_be_had_is_an_error_on_every_rank(start, how: str, needed: int):
    said = run(start, 3, "no_memory", how)
    assert len(said) == 3
    assert all(row == said[0] for row in said)
    assert said[0]["error"] == "InvalidInput"
    nbytes = int(said[0]["text"].split(" need ")[1].split()[0].replace(",", ""))
    slots = 5 * (1 << (22 if how == "limit" else 50))  # three of ranks, and two results
    assert slots < nbytes < slots + (1 << 20)


def test_what_a_rank_writes_to_its_result_is_its_own_and_is_undone(start):
    said = {row["rank"]: row["pages"] for row in run(start, 3, "private")}
    page = os.sysconf("SC_PAGESIZE")
    assert said[2] == [0] * 6
    assert said[1] == [0, 0] + [page] * 4
    assert said[0][:2] == [0, 0]
    assert all(0 <= nbytes - 4 * 200_001 < 2 * page for nbytes in said[0][2:])


def test_an_arena_leaves_nothing_open_mapped_or_running(start):
    for row in run(start, 2, "memory"):
        assert not row["named"]
        first, closed, gone = row["first"], row["closed"], row["gone"]
        assert first == [0, row["others"] + 1, 2, 1]  # memory, peers, mappings, threads
        assert closed == [0, row["others"], 1, 0]  # a tensor still shows the result
        assert gone == [0, row["others"], 0, 0]


def test_a_waiting_rank_serves_signals(start):
    assert run(start, 2, "interrupted") == [{"served": True}]


def test_a_rank_in_another_pid_namespace_is_a_machine_of_its_own(start):
    said = run(start, 2, "another_namespace")
    if "refused" in said[0]:
        pytest.skip(f"no new PID namespace: {said[0]['refused']}")
    ranks = {row["rank"]: row for row in said}
    assert [ranks[rank]["members"] for rank in (0, 1)] == [[0], [1]]
    assert [ranks[rank]["leaders"] for rank in (0, 1)] == [[0, 1]] * 2


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


def test_the_memory_is_this_users_alone_has_no_name_and_keeps_its_size():
    fd = allocate(1 << 16)
    try:
        status = os.fstat(fd)
        assert (status.st_mode & 0o777, status.st_nlink, status.st_size) == (0o600, 0, 1 << 16)
        assert status.st_blocks * 512 >= 1 << 16  # it is there, not only promised
        for size in (0, 1 << 17):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    finally:
        os.close(fd)
    with pytest.raises(InvalidInput, match=r"need 1,125,899,906,842,624 bytes"):
        allocate(1 << 50)


def test_a_thread_that_lags_behind_finds_nothing_to_do_in_new_chunks():
    small, large = Segment(0, 16, torch.float32), Segment(0, 1_000_000, torch.float32)
    arena = Arena(group_of(), 4_000_000, 1, 0, 5, threads=0)
    arena.set_chunks([[small]])
    arena.begin(1)
    arena.post(0)
    arena.commit()
    arena.wait_step()
    arena.slot.view(torch.float32).fill_(1.0)
    arena.set_chunks([[large]])
    # No rank drains a step that is good: what waits for it looks for work all the while.
    assert arena._native.wait(Goal.DRAINED, 1, 0) is Status.PENDING
    assert not arena.shared_result(1).any()
    arena.close()
