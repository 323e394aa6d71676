"""The session's ranks run functions that raise, hang or exit."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from faults import failpoints
from paceline.core.errors import InvalidInput
from paceline.links import failpoints as points
from pair import RankFailed, Ranks


def totals(values: list[float], folder: Path) -> tuple[torch.Tensor, str, Path, int]:
    total = torch.tensor(values[dist.get_rank()])
    dist.all_reduce(total)
    return total, os.environ["RANK"], Path.cwd() / folder.name, os.getpid()


def leaves_all_changed() -> tuple[torch.dtype, float, float, bool, str]:
    seen = torch.get_default_dtype(), random.random(), torch.rand(()).item()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT"] = "1"
    return *seen, torch.is_grad_enabled(), os.environ.get("PACELINE_ASKED", "")


def is_left() -> bool:
    return torch.is_grad_enabled() and "LEFT" not in os.environ


def refuses_on_rank_1() -> int:
    if dist.get_rank() == 1:
        raise InvalidInput("batch_size", "must be positive", got=0)
    return dist.get_rank()


def dies_on_rank_0() -> None:
    points.reach("pair.test", rank=dist.get_rank())
    dist.barrier()


def hangs_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def joins_by_itself() -> list[bool]:
    was = dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()
    return [was, dist.is_initialized()]


def returns_a_function() -> object:
    return totals


def test_all_ranks_run_a_function_in_a_group_of_their_own(pair: Ranks, triple: Ranks, tmp_path):
    found = [pair(totals, [1.0, 2.0, 4.0], tmp_path, cwd=tmp_path) for _ in range(2)]
    assert [(t.item(), rank, path) for t, rank, path, _ in found[0]] == [
        (3.0, "0", tmp_path / tmp_path.name),
        (3.0, "1", tmp_path / tmp_path.name),
    ]
    assert [one[3] for one in found[0]] == [one[3] for one in found[1]]
    assert [one[0].item() for one in triple(totals, [1.0, 2.0, 4.0], tmp_path)] == [7.0] * 3


def test_calls_leave_no_state_behind(pair: Ranks):
    first, second = (pair(leaves_all_changed) for _ in range(2))
    assert first == second
    assert first[0][0] is torch.float32
    assert pair(is_left) == [True, True]
    assert pair(leaves_all_changed, environment={"PACELINE_ASKED": "yes"})[1][-1] == "yes"
    assert pair(joins_by_itself, group=False) == [[False, True]] * 2


def test_an_error_comes_back_with_its_fields_and_fails_the_test_if_not_asked_for(pair: Ranks):
    fine, failure = pair(refuses_on_rank_1, errors=True)
    assert (fine, failure.kind, failure.fields["field"]) == (0, "InvalidInput", "batch_size")
    with pytest.raises(RankFailed, match="in refuses_on_rank_1"):
        pair(refuses_on_rank_1)
    with pytest.raises(RankFailed, match="Unsupported"):
        pair(returns_a_function)


def test_a_rank_that_hangs_or_dies_says_where_and_the_next_call_has_fresh_ranks(pair: Ranks):
    with pytest.raises(RankFailed, match=r"(?s)rank 1 hangs:.* in hangs_on_rank_1"):
        pair(hangs_on_rank_1, deadline_s=15.0)  # time to form the group on a busy machine
    with failpoints({"at": "pair.test", "rank": 0, "do": "SIGABRT"}):
        died, lost = pair(dies_on_rank_0, errors=True)
    assert (died.kind, lost.kind) == ("Died", "RuntimeError")
    assert signal.SIGABRT.name in died.text
    assert "dies_on_rank_0" in died.traceback
    assert pair(is_left) == [True, True]
