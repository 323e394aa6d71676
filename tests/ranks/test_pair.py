"""The session's ranks run functions that raise, hang or exit."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from faults import failpoints
from paceline.links import failpoints as points
from pair import RankFailed, Ranks


def leaves_all_changed() -> tuple[torch.dtype, float, float, bool]:
    seen = torch.get_default_dtype(), random.random(), torch.rand(()).item()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT"] = "1"
    return *seen, torch.is_grad_enabled()


def is_left() -> bool:
    return torch.is_grad_enabled() and "LEFT" not in os.environ


def dies_on_rank_0() -> None:
    points.reach("pair.test", rank=dist.get_rank())
    dist.barrier()


def hangs_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def test_calls_leave_no_state_behind(pair: Ranks):
    first, second = (pair(leaves_all_changed) for _ in range(2))
    assert first == second
    assert first[0][0] is torch.float32
    assert pair(is_left) == [True, True]


def test_a_rank_that_hangs_or_dies_says_where_and_the_next_call_has_fresh_ranks(pair: Ranks):
    with pytest.raises(RankFailed, match=r"(?s)rank 1 hangs:.* in hangs_on_rank_1"):
        pair(hangs_on_rank_1, deadline_s=15.0)  # time to form the group on a busy machine
    with failpoints({"at": "pair.test", "rank": 0, "do": "SIGABRT"}):
        died, lost = pair(dies_on_rank_0, errors=True)
    assert (died.kind, lost.kind) == ("Died", "RuntimeError")
    assert signal.SIGABRT.name in died.text
    assert "dies_on_rank_0" in died.traceback
    assert pair(is_left) == [True, True]
