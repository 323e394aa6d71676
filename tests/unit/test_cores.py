"""How many cores an exchange takes, and what computation loses to it."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure import cores
from paceline.measure.cores import CoreTime, lost_beside
from paceline.measure.link import message_speed


@pytest.mark.parametrize(
    ("taken", "workers", "num_cores", "threads", "lost"),
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
def test_idle_cores_come_first(taken, workers, num_cores, threads, lost):
    assert lost_beside(taken, workers, num_cores, threads) == pytest.approx(lost)


@given(st.floats(0, 64), st.integers(1, 8), st.integers(1, 64), st.integers(1, 64), st.floats(0, 8))
def test_more_taken_is_never_less_lost(taken, workers, num_cores, threads, more):
    less, most = (lost_beside(n, workers, num_cores, threads) for n in (taken, taken + more))
    assert 0 <= less <= most < 1


def test_a_work_takes_the_processor_time_of_its_calls(monkeypatch):
    clock = SimpleNamespace(busy_s=1.0, elapsed_s=5.0)
    monkeypatch.setattr(cores, "time", clock)
    clock.process_time, clock.perf_counter = lambda: clock.busy_s, lambda: clock.elapsed_s

    def work() -> None:
        clock.busy_s += 3.0
        clock.elapsed_s += 2.0

    timed = CoreTime(work)
    assert (timed.num_cores, timed.busy_s) == (0.0, 0.0)
    for _ in range(3):
        timed()
        clock.busy_s += 10.0  # between calls
        clock.elapsed_s += 1.0
    assert timed.num_cores == pytest.approx(1.5)
    assert timed.busy_s == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("num_cores", "processes", "times"),
    [(1, 3, 1), (2, 3, 2), (16, 1, 2), (16, 4, 8)],  # a process has two threads for messages
)
def test_a_host_handles_messages_with_cores_that_its_processes_can_use(num_cores, processes, times):
    assert message_speed(1e9, num_cores, processes) == times * 1e9
