"""Who has to wait for whom: the bound on how far one worker may be ahead of another."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halved import CASES, batches, serve
from paceline.core.errors import WorkerLost
from paceline.strategies.wheel.membership import HeadGradients, Membership, Workers
from refusals import refused
from rpc_exchange import Clock

CUT = "layers.3"


def test_no_workers_are_refused():
    with refused("workers"):
        Workers(0, None)


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["go", "go", "go", "join", "lose"]))),
)
def test_nobody_is_further_ahead_than_the_bound(num_workers: int, bound: int, events: list):
    """Against a naive account; and somebody can always go on, so that nobody waits for ever."""
    workers = Workers(num_workers, bound)
    done, live = [0] * num_workers, set()
    for worker, event in events:
        worker %= num_workers
        if event == "lose":
            workers.drop(worker)
            live.discard(worker)
        elif event == "join" or worker not in live:
            workers.add(worker)
            live.add(worker)
        else:
            may = workers.may_begin(worker, done[worker])
            assert may == (done[worker] - min(done[one] for one in live) <= bound)
            if may:
                workers.of(worker).complete(done[worker] + 1, sum(done) + 1)
                done[worker] += 1
        assert not live or any(workers.may_begin(one, done[one]) for one in live)


def test_a_step_asked_for_beforehand_counts_the_one_that_is_half_done():
    """With lanes, parameters are fetched before the last gradients are sent (plan.py)."""
    case = CASES["mlp"]
    server, (one, other) = serve(case, CUT, num_workers=2, staleness=1)
    (batch,) = batches(case, 1)
    version = one.fetch()
    gradients, _ = one.forward(0, version, *batch)
    assert server.may_begin(0, 1)
    server.update(0, 0, version, gradients)
    one.forward(1, one.fetch(), *batch)
    assert not server.may_begin(0, 2)  # worker 1 has done none
    assert server.may_begin(1, 0)
    other.step(0, *batch)
    assert not server.may_begin(0, 3)
    server.workers.drop(1)
    assert server.may_begin(0, 2)


def test_a_step_that_is_half_done_is_not_behind_a_worker():
    """Not even if it has asked for the next one already."""
    workers = Workers(2, 1)
    for worker in (0, 1):
        workers.add(worker)
    for step in (0, 1):
        workers.of(1).complete(step + 1, step + 1)
    workers.of(0).half = HeadGradients(0, 0, [])
    assert workers.may_begin(0, 1)
    assert not workers.may_begin(1, 2)


def test_free_workers_wait_for_nobody():
    workers = Workers(2, None)
    workers.add(1)
    assert workers.may_begin(0, 1000)


def test_after_a_restart_workers_that_are_ahead_of_the_server_go_on():
    """Workers whose last steps a restarted hub does not know must not wait for each other."""
    workers = Workers(2, 0)
    workers.restore([replace(one, next_step=100) for one in workers.progress()])
    for worker in (0, 1):
        workers.add(worker)
    assert not workers.may_begin(0, 120)
    assert workers.may_begin(1, 120)
    assert workers.may_begin(0, 120)


class Run:
    """Membership of a run, its clock, and who was admitted with which step."""

    def __init__(self, num_workers: int = 2, wait_s: float = 60.0) -> None:
        self.clock, self.workers = Clock(), Workers(num_workers, None)
        self.admitted: list[tuple[int, int]] = []
        admit = lambda *who: self.admitted.append(who)  # noqa: E731
        self.membership = Membership(self.workers, wait_s, admit, self.clock)


def test_a_run_begins_with_all_workers_or_those_who_came_in_time():
    for late in (False, True):
        run = Run()
        run.membership.wait(0, 0)
        assert not run.membership.is_ready
        if late:
            run.clock.now_s += 60.1
        else:
            run.membership.wait(1, 0)
        assert run.membership.is_ready
        run.membership.begin()
        assert run.admitted == [(0, 0)] + [(1, 0)] * (not late)
        if late:
            run.workers.of(0).complete(7, 7)
            run.membership.wait(1, 0)  # steps that others have made are not made up for
            assert run.admitted[-1] == (1, 7)


def test_a_run_without_workers_ends_after_the_wait():
    run = Run()
    run.clock.now_s += 59.9
    assert not run.membership.is_ready
    run.clock.now_s += 0.2
    with pytest.raises(WorkerLost):
        assert run.membership.is_ready
    run = Run()
    for worker in (0, 1):
        run.membership.wait(worker, 0)
    run.membership.begin()
    for worker in (0, 1):
        assert run.membership.drop(worker)
        assert not run.membership.drop(worker)
    run.clock.now_s += 59.9
    run.membership.poll()
    run.membership.wait(0, 0)
    run.membership.drop(0)
    run.clock.now_s += 0.2
    with pytest.raises(WorkerLost):
        run.membership.poll()


def test_a_run_ends_when_all_are_done_or_will_never_be_back():
    run = Run()
    for worker in (0, 1):
        run.membership.wait(worker, 0)
    run.membership.begin()
    run.workers.of(0).complete(4, 4)
    assert run.membership.num_steps == 0
    run.membership.finish(0)
    assert not run.membership.is_over
    run.membership.drop(1)
    assert run.membership.is_over
    assert run.membership.num_steps == 4
    run = Run(1)
    run.membership.wait(0, 0)
    run.membership.begin()
    run.membership.mark_dead(0, "was ended by SIGKILL")
    run.membership.drop(0)
    with pytest.raises(WorkerLost, match="SIGKILL"):
        run.membership.poll()


def test_after_its_parent_has_begun_anew_all_begin_again_together():
    run = Run()
    for worker in (0, 1):
        run.membership.wait(worker, 0)
    run.membership.begin()
    run.membership.restart()
    run.membership.wait(0, 3)
    assert len(run.admitted) == 2
    run.membership.wait(1, 2)
    assert run.admitted[2:] == [(0, 0), (1, 0)]
