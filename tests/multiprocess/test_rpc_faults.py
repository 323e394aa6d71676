"""Networks that fail and processes that are killed: no request is lost or executed twice."""

import signal
import time
from pathlib import Path

import pytest

from rpc_exchange import MIB, executed, expected, line_of, lines, outcome

pytestmark = pytest.mark.slow


def test_cut_connections_do_not_change_the_result(hub, worker, proxy):
    nbytes, steps = MIB, 5
    served, port = hub(nbytes=nbytes, workers=1)
    between = proxy(port, 0.002)
    started = worker(between.port, steps=steps, nbytes=nbytes)
    assert line_of(started) == {"joined": True}
    for share in (0.3, 1.2, 0.7, 2.1, 0.5):  # in the middle of messages, in both directions
        between.wait_for(int(share * nbytes))
        between.cut()
    end = outcome(started)[-1]
    told = outcome(served)
    assert between.num_connections >= 5
    assert end["restarts"] == 0
    assert executed(told) == list(range(steps))
    assert told[-1]["states"] == {"0": expected(0, steps, nbytes)}
    assert [one for one in told if "joined" in one or "lost" in one] == [
        {"joined": 0},
        {"lost": 0, "why": "has left"},
    ]


def test_a_partition_does_not_change_the_result(hub, worker, proxy):
    """Both sides are silent for longer than a connection is trusted, in the middle of a push."""
    nbytes, steps = MIB, 3
    served, port = hub(nbytes=nbytes)
    between = proxy(port, 0.002)
    started = worker(between.port, steps=steps, nbytes=nbytes)
    between.wait_for(int(1.5 * nbytes))
    between.stop()
    time.sleep(6.5)
    between.go_on()
    assert outcome(started)[-1]["restarts"] == 0
    told = outcome(served)
    assert between.num_connections >= 2
    assert executed(told) == list(range(steps))
    assert told[-1]["states"] == {"0": expected(0, steps, nbytes)}


def test_a_worker_killed_in_the_middle_of_a_push_is_lost_and_replaced(hub, worker, proxy):
    nbytes, steps = 2 * MIB, 3
    served, port = hub(nbytes=nbytes, workers=2, reconnect_timeout_s=0.5)
    between = proxy(port, 0.004)
    killed = worker(between.port, worker=0, steps=steps, nbytes=nbytes)
    assert line_of(killed) == {"joined": True}
    between.wait_for(int(1.5 * nbytes))  # the parameters, and half of the first push
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    other = worker(port, worker=1, steps=steps, nbytes=nbytes)
    assert outcome(other)[-1]["restarts"] == 0
    again = worker(port, worker=0, steps=steps, nbytes=nbytes)
    outcome(again)
    told = outcome(served)
    assert [executed(told, w) for w in range(2)] == [list(range(steps))] * 2
    assert told[-1]["states"] == {str(w): expected(w, steps, nbytes) for w in range(2)}
    why = next(one["why"] for one in told if one.get("lost") == 0)
    assert "has not come back" in why or "replaced" in why
    assert [one["joined"] for one in told if "joined" in one].count(0) == 2


def test_a_killed_hub_resumes_from_its_state(hub, worker, tmp_path: Path):
    """Its workers come back by themselves, and begin the step again that was not done."""
    nbytes, steps = MIB, 40
    state = str(tmp_path / "state.json")
    served, port = hub(nbytes=nbytes, state=state)
    started = worker(port, steps=steps, nbytes=nbytes)
    before = []
    while len(executed(before)) < 3:
        before.append(line_of(served))
    served.process.send_signal(signal.SIGKILL)
    before += lines(served.process.stdout.read())
    served.process.wait()
    served, _ = hub(port, nbytes=nbytes, state=state)
    assert outcome(started)[-1]["restarts"] == 1
    told = outcome(served)
    assert told[-1]["states"] == {"0": expected(0, steps, nbytes)}
    # What was printed but not saved when the hub was killed is all that may be done again.
    done = executed(before)
    assert done == list(range(len(done)))
    assert executed(told) == list(range(executed(told)[0], steps))
    assert len(done) - 1 <= executed(told)[0] <= len(done)
