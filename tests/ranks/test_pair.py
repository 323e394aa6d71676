"""The session's ranks keep no state of a function that they ran."""

import os
import random

import torch

from pair import Ranks


def leaves_all_changed() -> tuple[torch.dtype, float, float, bool]:
    seen = torch.get_default_dtype(), random.random(), torch.rand(()).item()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT"] = "1"
    return *seen, torch.is_grad_enabled()


def is_left() -> bool:
    return torch.is_grad_enabled() and "LEFT" not in os.environ


def test_calls_leave_no_state_behind(pair: Ranks):
    first, second = (pair(leaves_all_changed) for _ in range(2))
    assert first == second
    assert first[0][0] is torch.float32
    assert pair(is_left) == [True, True]
