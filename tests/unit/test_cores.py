"""How many cores an exchange takes, and what computation loses to it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure.cores import CoreTime, lost_beside
from paceline.measure.link import message_speed


@pytest.mark.parametrize(
    ("taken", "workers", "cores", "threads", "lost"),
    [
        (0.5, 1, 1, 1, 0.5),  # one core for both
        (0.5, 1, 2, 1, 0.0),  # the second core is idle
        (1.5, 1, 2, 1, 0.5),
        (0.5, 2, 2, 1, 0.5),  # two workers leave none idle
        (0.5, 1, 4, 4, 0.125),  # four threads wait for the slowest no longer than an eighth
        (3.0, 1, 1, 1, 0.95),  # computation still gets some of the time
        (0.5, 4, 2, 1, 0.5),  # more workers than cores: none is idle, and none is owed
    ],
)
def test_idle_cores_come_first(taken, workers, cores, threads, lost):
    assert lost_beside(taken, workers, cores, threads) == pytest.approx(lost)


@given(st.floats(0, 64), st.integers(1, 8), st.integers(1, 64), st.integers(1, 64), st.floats(0, 8))
def test_more_taken_is_never_less_lost(taken, workers, cores, threads, more):
    less, most = (lost_beside(n, workers, cores, threads) for n in (taken, taken + more))
    assert 0 <= less <= most < 1


def test_a_work_that_sleeps_takes_no_core():
    sleeping = CoreTime(lambda: time.sleep(0.05))
    for _ in range(3):
        sleeping()
    assert sleeping.num_cores < 0.5


def test_a_work_is_counted_by_its_processor_time():
    before = time.process_time()
    spinning = CoreTime(lambda: sum(range(200_000)))
    while time.process_time() < before + 0.05:
        spinning()
    assert spinning.num_cores > 0.0


def test_what_was_never_called_took_nothing():
    assert CoreTime(lambda: None).num_cores == 0.0


def test_the_mean_of_a_work_is_that_of_its_calls():
    spinning = CoreTime(lambda: sum(range(200_000)))
    before = time.process_time()
    for _ in range(20):
        spinning()
    assert 0 < 20 * spinning.busy_s <= time.process_time() - before


@pytest.mark.parametrize(
    ("cores", "processes", "times"),
    [(1, 3, 1), (2, 3, 2), (16, 1, 2), (16, 4, 8)],  # a process has two threads for messages
)
def test_a_host_handles_messages_with_the_cores_that_its_processes_can_use(cores, processes, times):
    assert message_speed(1e9, cores, processes) == times * 1e9
