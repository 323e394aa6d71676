"""Workers that try their ways to the hub do so one after another: the ways may share a wire."""

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from paceline.core.errors import WorkerLost
from paceline.machine_file import find_device
from paceline.strategies.wheel.body import agreement
from paceline.strategies.wheel.heads import HeadWorkers
from paceline.strategies.wheel.hub import Hub
from paceline.strategies.wheel.job import Topic
from paceline.strategies.wheel.order import job_of, largest_nbytes, resolved
from paceline.strategies.wheel.paced import stand_in
from paceline.strategies.wheel.profile import Profile
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.tally import Conduct
from paceline.wheel_rehearsal import build
from paceline.wheel_settings import WheelRehearseSettings
from paceline.wire.client import Client
from paceline.wire.identity import Identity
from paceline.wire.messages import Message
from paceline.wire.service import Service

NBYTES, WAIT_S = 70_000, 3.0
PROFILE = Profile(kind="cpu", host="here", seconds=(), codecs={}).model_dump_json().encode()


def quiet(text: str) -> None:
    """Say nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    """Where a hub listens that gives up after a while, as nobody begins."""
    settings = WheelRehearseSettings(model="lenet5", device="p100", options={"lanes": 1})
    run, parts = resolved(build(settings, find_device("p100")))
    job, largest = job_of(run), largest_nbytes(parts, run.config)
    assert job.pace is not None
    model, halves = stand_in(job.model, job.first, job.pace)
    optimizer = run.make(model.parameters())
    server = ParameterServer(model, halves, optimizer, num_workers=2, staleness=1, looks=False)
    heads = HeadWorkers(server, job, torch.device("cpu"), "cpu0", largest)
    service = Service(
        "tcp://127.0.0.1:0",
        "trials",
        agreement(),
        keys=None,
        num_workers=2,
        largest_nbytes=largest,
        settings=job.packed(),
        say=quiet,
    )
    conduct = Conduct(test=lambda *_: pytest.fail("nobody trains"), wait_s=WAIT_S)
    hub = Hub(service, server, heads, job, "{}", 1, conduct)
    ended: list[WorkerLost] = []

    def serve() -> None:
        try:
            hub.run()
        except WorkerLost as error:
            ended.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    with closing(service):
        yield service.address
        serving.join(10 * WAIT_S)
    assert [str(error) for error in ended] == [f"no worker has come within {WAIT_S:g} s"]


def client(address: str, worker: int) -> Client:
    identity = Identity("trials", agreement(), worker)
    return Client(address, identity, keys=None, deadline_s=10.0, say=quiet)


def test_a_worker_waits_until_the_one_before_it_has_its_profile(address: str):
    probe = Message(Topic.PROBE.value, NBYTES, parts=(bytes(10),))
    with closing(client(address, 0)) as first, closing(client(address, 1)) as second:
        assert len(first.request(probe).result().parts[0]) == NBYTES
        waiting = second.request(probe)
        assert len(first.request(probe).result().parts[0]) == NBYTES
        assert not waiting.wait(0.3)
        first.request(Message(Topic.PROFILE.value, parts=(PROFILE,))).result()
        assert waiting.wait(5)
        assert len(waiting.result().parts[0]) == NBYTES
