"""Workers that measure their links to the hub do so one after another: they may share a wire."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from unittest.mock import Mock

import pytest
import torch

from paceline.core.errors import WorkerLost
from paceline.models.paced import PacedSGD
from paceline.recipes.named import workload_of
from paceline.rpc.client import Client
from paceline.rpc.frames import Message
from paceline.rpc.limits import Identity
from paceline.rpc.workers import agreement
from paceline.strategies.wheel.config import PaceSpec, RunSpec, Wheel
from paceline.strategies.wheel.hub import Hub
from paceline.strategies.wheel.job import TrainingJob
from paceline.strategies.wheel.measure import DeviceProfile
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.split import split
from paceline.strategies.wheel.stand_in import paced_recipe, stand_in

NBYTES, WAIT_S, NUM_LAYERS = 70_000, 3.0, 5
PROFILE = DeviceProfile(kind="cpu", host="here", seconds=(), codecs={}).model_dump_json().encode()
ZEROS = (0.0,) * NUM_LAYERS
SPEC = RunSpec(
    model="lenet5",
    data=None,
    batch_size=64,
    num_steps=1,
    seed=0,
    config=Wheel(workers=2, lanes=1, head="fc3"),
    profile_s=1.0,
    boot_id="",
    pace=PaceSpec(
        samples=32,
        target_nbytes=4,
        input_shape=None,
        forward_s=ZEROS,
        backward_s=ZEROS,
        update_s=0.0,
    ),
)
SETTINGS = Mock(bind="tcp://127.0.0.1:0", keys=None, wait_s=WAIT_S, deadline_s=10.0)


@pytest.fixture
def address() -> Iterator[str]:
    """Where a hub listens that gives up after a while, as nobody begins."""
    model, halves = stand_in(SPEC)
    workload = workload_of("lenet5", 32, None)
    parts = split(workload, SPEC.config)
    recipe, cpu = paced_recipe(SPEC), torch.device("cpu")
    job = TrainingJob(SPEC, recipe, model, halves, workload, parts, cpu)
    optimizer = PacedSGD(model.parameters(), 0.0)
    server = ParameterServer(
        model, halves, optimizer, num_workers=2, staleness=1, checks_values=False
    )
    ended: list[WorkerLost] = []
    with ExitStack() as stack:
        hub = Hub(stack, SETTINGS, "trials", job, server, Mock(), test=Mock())

        def wait() -> None:
            try:
                hub.wait_for_workers()
            except WorkerLost as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        yield hub.rpc.address
        waiting.join(10 * WAIT_S)
    assert [str(error) for error in ended] == [f"no worker has come within {WAIT_S:g} s"]


def client(address: str, worker: int) -> Client:
    return Client(address, Identity("trials", agreement(), worker), keys=None, deadline_s=10.0)


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
