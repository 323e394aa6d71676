"""The state that a worker sends to a joining worker."""

import io
import math
import pickle
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.exchange.elastic import PeerTransport
from paceline.exchange.inner_steps import InnerSteps, StepLock
from rpc_exchange import beside

STATE = {
    "user": {"scheduler": {"last": (1, math.inf), 3: torch.tensor(2.0, dtype=torch.float64)}},
    "list": [torch.arange(4).reshape(2, 2), torch.zeros(0, 3), None, torch.tensor([True])],
    "half": torch.ones(3, dtype=torch.bfloat16),
}


def sent_and_received() -> Any:
    transport = PeerTransport(lambda: dist.group.WORLD)
    wait = timedelta(seconds=5)
    if dist.get_rank() == 0:
        transport.send_checkpoint([1], 0, STATE, wait)
        return None
    return transport.recv_checkpoint(0, "", 0, wait)


def test_a_state_arrives_as_it_was(pair: Any) -> None:
    _, found = pair(sent_and_received)
    torch.testing.assert_close(found, STATE, rtol=0, atol=0)
    assert isinstance(found["user"]["scheduler"]["last"], tuple)


class Opened:
    def __reduce__(self) -> Any:
        return open, ("unpickled", "w")


def a_pickle_received(content: bytes) -> None:
    if dist.get_rank() == 0:
        for row in (
            torch.tensor([len(content)]),
            torch.frombuffer(bytearray(content), dtype=torch.uint8),
        ):
            dist.send(row, 1)
    else:
        PeerTransport(lambda: dist.group.WORLD).recv_checkpoint(0, "", 0, timedelta(seconds=5))


def test_bytes_that_are_no_state_are_refused_and_not_unpickled(pair: Any) -> None:
    saved = io.BytesIO()
    torch.save(Opened(), saved)
    for content in (
        pickle.dumps(Opened()),
        saved.getvalue(),
        b'[{}, [[["a"], "torch.load", [1]]]]',
    ):
        _, failure = pair(a_pickle_received, content, errors=True)
        assert failure.fields["field"] == "state"


class Slow(torch.optim.SGD):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun, self.read, self.done = threading.Event(), threading.Event(), []

    def step(self, closure: Any = None) -> None:
        self.begun.set()
        self.read.wait(0.2)  # longer than a copy takes that ignores the step
        super().step()
        self.done.append("stepped")


def test_a_state_is_not_read_in_the_middle_of_a_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = Slow(model.parameters(), 0.1)
    steps, lock = InnerSteps(model, optimizer), StepLock([optimizer], 10)
    steps.watch(lambda: None, lock)

    def read() -> None:
        assert optimizer.begun.wait(10)
        with lock:
            optimizer.done.append("read")
        optimizer.read.set()

    reading = beside(read)
    optimizer.step()
    reading.result()
    assert optimizer.done == ["stepped", "read"]
    steps.remove()
    assert not optimizer._optimizer_step_pre_hooks
