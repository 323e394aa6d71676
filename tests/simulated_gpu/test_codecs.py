"""Codecs and messages on a simulated GPU give the bytes of the CPU, whatever the delays."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import codec_cases as cases
from paceline.codecs.blockwise import EightBit
from paceline.codecs.names import find_codec
from paceline.core.plan import Kind
from paceline.core.wire_format import Purpose, wire_format
from paceline.links.clock import Clock, clock_for
from paceline.record.recorder import LayerMarks
from paceline.record.worker_trace import WorkerRecorder
from paceline.rpc.frames import Message
from paceline.rpc.tensor_parts import CopyLane, Endpoint
from paceline.strategies.wheel.config import Wheel

NAMES = ("half", "onebit", "threshold:0.5", "dynamic8", "e3m0", "e3m0+feedback")
SLOW_S = 0.01


@pytest.mark.parametrize("name", NAMES)
def test_payloads_are_those_of_the_cpu(device, name):
    values = cases.normal(5_001)
    values[[5, 77]] = torch.nan
    here, there = find_codec(name), find_codec(name)
    for _ in range(2):  # with error feedback, the second encoding adds the first one's errors
        cases.check_on_device(here, there, values, values.to(device.torch_device))
    apart = values[:5_000].view(-1, 2)
    codec = EightBit("linear8", block_size=100, offset=3.0)  # a fixed scale
    cases.check_on_device(codec, codec, apart[:, 1], apart.to(device.torch_device)[:, 1])


def endpoint_on(copies: CopyLane, clock: Clock, worker: int = 0, **codecs: str) -> Endpoint:
    recorder = WorkerRecorder(worker, "gpu1", LayerMarks((), clock))
    return Endpoint(Wheel(**codecs).codecs, torch.float32, recorder, copies)


def arrived(message: Message) -> Message:
    """Return a message as a socket delivers it."""
    return replace(message, parts=tuple(bytearray(part) for part in message.parts))


@pytest.mark.parametrize("codec", [None, "dynamic8", "half", "onebit"])
def test_messages_between_devices_carry_the_values(device, codec):
    device.delays = lambda stream, what: SLOW_S
    codecs = {} if codec is None else {"gradients": codec}
    copies, purpose = CopyLane(device.torch_device), Purpose.GRADIENTS
    clock = clock_for(device.torch_device)
    ends = [endpoint_on(copies, clock, **codecs) for _ in range(2)]
    values = torch.randn(6, 50).t()
    sent = ends[0].message(purpose, 3, 0, values.to(device.torch_device) + 1.0)
    assert sent.nbytes == (1200 if codec is None else wire_format(codec).nbytes(300))
    found = ends[1].values(purpose, arrived(sent), 0.0, 300)
    expected = (values + 1.0).reshape(-1)
    if codec is not None:
        other = find_codec(codec)
        expected = other.decode(other.encode(expected))
    assert found.device == device.torch_device
    assert torch.equal((found * 2.0).cpu(), expected * 2.0)
    kinds = [[span.kind for span in end.recorder.trace.spans] for end in ends]
    assert kinds[0] == ([] if codec is None else [Kind.ENCODE]) + [Kind.D2H]
    assert kinds[1] == [Kind.H2D] + ([] if codec is None else [Kind.DECODE])


def test_received_values_are_not_freed_while_another_stream_reads_them(device):
    """The copy stream allocates the values; another stream reads them while they are freed."""
    device.delays = lambda stream, what: SLOW_S
    end = endpoint_on(CopyLane(device.torch_device), clock_for(device.torch_device))
    values = torch.randn(64)
    message = arrived(end.message(Purpose.PARAMETERS, 0, 0, values.to(device.torch_device)))
    with device.use(device.new_stream()):
        found = end.values(Purpose.PARAMETERS, message, 0.0, 64) * 3.0
        for _ in range(3):
            end.values(Purpose.PARAMETERS, message, 0.0, 64)
        assert torch.equal(found.cpu(), values * 3.0)
    device.synchronize()


def test_workers_of_one_device_copy_one_after_another(device):
    """Plans, too, have one lane for the copies to a device."""
    device.delays = lambda stream, what: SLOW_S
    copies, clock = CopyLane(device.torch_device), clock_for(device.torch_device)
    ends = [endpoint_on(copies, clock, worker) for worker in range(3)]
    together = threading.Barrier(len(ends))

    def receive(end: Endpoint) -> None:
        for step in range(4):
            together.wait()
            end.to_device(step, Purpose.PARAMETERS, (memoryview(bytearray(4000)),))

    with ThreadPoolExecutor(len(ends)) as threads:
        list(threads.map(receive, ends))
    spans = sorted(
        (span for end in ends for span in end.recorder.trace.spans), key=lambda span: span.start_s
    )
    assert len(spans) == 12
    assert all(one.end_s <= other.start_s for one, other in pairwise(spans))
