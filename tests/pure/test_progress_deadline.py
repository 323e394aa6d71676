"""The deadline for workers that keep their connection alive but make no progress."""

from types import SimpleNamespace

import pytest

from paceline.strategies.wheel.worker_group import ProgressDeadline

DEADLINE_S = 5.0


@pytest.mark.parametrize(("usual_s", "allowed_s"), [(0.01, DEADLINE_S), (1.0, 20.0)])
def test_a_worker_may_take_twenty_times_its_median_and_at_least_the_deadline(usual_s, allowed_s):
    clock = SimpleNamespace(now_s=100.0)
    turns = ProgressDeadline(DEADLINE_S, lambda: clock.now_s)
    for _ in range(5):
        turns.replied(0)
        clock.now_s += usual_s
        turns.requested(0)
    clock.now_s += 1000  # the worker waits for the hub
    assert turns.overdue() == {}
    turns.replied(0)
    clock.now_s += allowed_s - 0.001
    assert turns.overdue() == {}
    clock.now_s += 0.002
    assert turns.overdue() == {0: pytest.approx(allowed_s + 0.001)}
    turns.forget(0)
    assert turns.overdue() == {}


def test_the_first_step_has_a_longer_deadline_and_pauses_of_the_hub_do_not_count():
    clock = SimpleNamespace(now_s=100.0)
    turns = ProgressDeadline(DEADLINE_S, lambda: clock.now_s)
    turns.replied(3)
    clock.now_s += 9.9 * DEADLINE_S
    assert turns.overdue() == {}
    turns.paused(8 * DEADLINE_S)
    clock.now_s += 8 * DEADLINE_S
    assert turns.overdue() == {}
    clock.now_s += DEADLINE_S
    assert set(turns.overdue()) == {3}
