"""The hub of strategy wheel before training: workers measure their links in turn."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from unittest.mock import Mock

import pytest

from paceline.core.errors import NonFinite, WorkerLost
from paceline.measure.device_profile import DeviceProfile
from paceline.rpc.client import Client
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.frames import Message
from paceline.rpc.server import Server
from paceline.rpc.workers import REFUSED, connected
from paceline.strategies.wheel import hub as module_of_hub
from paceline.strategies.wheel.config import PaceSpec, RunSpec, Wheel
from paceline.strategies.wheel.epochs import EpochLog
from paceline.strategies.wheel.hub import Hub
from paceline.strategies.wheel.job import _job_in, server_options
from paceline.strategies.wheel.protocol import OF_LIVE, Topic
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.worker import take_part
from refusals import refused
from rpc_exchange import DEADLINE_S, Clock, beside, until

NBYTES, WAIT_S, NUM_LAYERS = 70_000, 60.0, 5
PROFILE = DeviceProfile(kind="cpu", host="here", seconds=(), codecs={}).model_dump_json().encode()
ZEROS = (0.0,) * NUM_LAYERS
PACE = PaceSpec(
    samples=32, target_nbytes=4, input_shape=None, forward_s=ZEROS, backward_s=ZEROS, update_s=0.0
)
SPEC = RunSpec(
    model="lenet5",
    data=None,
    batch_size=64,
    num_steps=1,
    seed=0,
    config=Wheel(workers=2, lanes=1, head="fc3"),
    profile_s=0.0,
    boot_id="",
    pace=PACE,
)
SETTINGS = Mock(listen="tcp://127.0.0.1:0", keys=None, wait_s=WAIT_S, deadline_s=10.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def idle(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that serves nobody; its heartbeats ignore the test's clock."""
    monkeypatch.setattr(module_of_hub, "Server", lambda *of, clock, **more: Server(*of, **more))
    job = _job_in(SPEC)
    own = job.model, job.halves, job.optimizer(job.model)
    server = ParameterServer(*own, **server_options(job))
    with ExitStack() as stack:
        log = EpochLog(job, Mock())
        yield Hub(stack, SETTINGS, "trials", job, server, log, clock=clock)


@pytest.fixture
def hub(idle: Hub, clock: Clock) -> Iterator[Hub]:
    """A hub that ends because no worker trains, although heartbeats continue."""
    serving = beside(lambda: (idle.wait_for_workers(), idle.train()))
    yield idle
    until(lambda: not idle._server.workers.live)
    clock.now_s += WAIT_S + 0.1
    with pytest.raises(WorkerLost):
        serving.result(DEADLINE_S)


def client(hub: Hub, worker: int) -> Client:
    return Client(hub.rpc.address, "trials", worker, keys=None, deadline_s=60.0)


PROBE = Message(Topic.PROBE.value, NBYTES, parts=(bytes(10),))


@pytest.mark.parametrize("stops", [False, True])
def test_a_worker_probes_after_the_previous_one_has_sent_its_profile_or_stopped(hub, clock, stops):
    with closing(client(hub, 0)) as first, closing(client(hub, 1)) as second:
        assert len(first.request(PROBE).result().parts[0]) == NBYTES
        waiting = second.request(PROBE)
        second.request(Message(Topic.CLOCK.value)).result()  # the hub handles it after the probe
        assert len(first.request(PROBE).result().parts[0]) == NBYTES
        assert not waiting.wait(0.0)
        if stops:
            clock.now_s += 10.1
        else:
            first.request(Message(Topic.PROFILE.value, parts=(PROFILE,))).result()
        assert len(waiting.result().parts[0]) == NBYTES


def test_a_process_with_workers_that_do_not_share_a_device_is_refused(hub: Hub):
    settings = WorkerProcessSettings(
        connect=hub.rpc.address, run_name="trials", workers=(0, 1), device="cpu"
    )
    with refused("workers"), connected(settings, None) as clients:
        take_part(settings, clients)


def test_workers_that_do_not_train_must_begin_again(hub: Hub):
    """For example after a restart of the hub between two requests of a step."""
    with closing(client(hub, 0)) as one:
        for topic in OF_LIVE:
            assert one.request(Message(topic.value)).result().topic == Topic.AGAIN


def test_workers_with_heartbeats_that_complete_no_step_are_lost(hub: Hub, clock: Clock):
    layout = memoryview(hub.answers._gate._layout.encode())
    begin = Message(Topic.BEGIN.value, parts=(layout,))
    with closing(client(hub, 0)) as first, closing(client(hub, 1)) as second:
        for begun in [first.request(begin), second.request(begin)]:
            assert begun.result().step == 0
        clock.now_s += 99
        until(lambda: hub._polled_s == clock.now_s)
        assert not hub.group.lost
        clock.tick_s = 0.5
        until(lambda: len(hub.group.lost) == 2)
        clock.tick_s = 0.0


def test_values_that_are_not_finite_end_the_run_only_if_no_worker_has_sent_others_since(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    execute = hub.answers.execute

    def updated(request):
        if request.message.topic != Topic.GRADIENTS:
            return execute(request)
        if request.message.step:
            raise NonFinite(f"worker {request.worker} has sent NaN")
        return Message(Topic.AGAIN.value)

    monkeypatch.setattr(hub.answers, "execute", updated)
    begin = Message(Topic.BEGIN.value, parts=(memoryview(hub.answers._gate._layout.encode()),))
    finite, nan = (Message(Topic.GRADIENTS.value, step) for step in (0, 1))
    with closing(client(hub, 0)) as first, closing(client(hub, 1)) as second:
        for begun in [first.request(begin), second.request(begin)]:
            begun.result()
        assert first.request(nan).result().topic == REFUSED
        for request in (begin, finite):  # the worker is back
            first.request(request).result()
        assert second.request(nan).result().topic == REFUSED
        assert first.request(finite).result().topic == Topic.AGAIN


def test_the_last_epoch_is_tested_if_the_last_worker_is_overdue(idle: Hub, clock: Clock):
    workers = idle._server.workers
    for worker in (0, 1):
        workers.add(worker)
    workers.of(0).complete(SPEC.num_steps)
    idle.group.finish(0)
    idle.group.deadline.replied(1)
    clock.now_s += 101.0
    idle.train()
    assert (len(idle.group.lost), len(idle.log.epochs)) == (1, 1)
