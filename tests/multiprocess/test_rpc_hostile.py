"""Hostile peers: the hub drops what they send, logs it, and keeps serving the others."""

import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from paceline.rpc.frames import (
    HEADER_NBYTES,
    PIECE_NBYTES,
    FrameHeader,
    Message,
    MessageKind,
    pack,
    split,
    unpack,
)
from paceline.rpc.limits import Identity
from processes import Started
from rpc_exchange import LAYOUT, RUN, expected, line_of, outcome

pytestmark = pytest.mark.slow

NONCE = Identity(RUN, LAYOUT, 0).nonce
NBYTES = 100_000
NUM_HOSTILE = 6 * 2 * 4 * 13  # wrong messages
MAX_GROWTH = 32 << 20  # of which the queues of the connections may take 8 MiB each


class Raw:
    """A worker that sends exactly what a test wants."""

    def __init__(self, port: int, worker: int = 0) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.sndhwm = 4  # so that the hub has got all but the last when this goes on
        self._socket.sndtimeo = self._socket.rcvtimeo = 20_000
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.worker = worker

    def header(
        self, kind: MessageKind, sequence: int = 0, acknowledged: int = 0, **more
    ) -> FrameHeader:
        return FrameHeader(kind, NONCE, self.worker, sequence, acknowledged, **more)

    def frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def send(self, header: FrameHeader, *parts: bytes, topic: str = "") -> None:
        for piece in split(header, Message(topic, parts=parts)):
            self.frames(piece.frame, piece.payload)

    def push(self, sequence: int, acknowledged: int = 0, payload: bytes = b"a push") -> None:
        self.send(self.header(MessageKind.REQUEST, sequence, acknowledged), payload, topic="push")

    def join(self, token: bytes = bytes(8), layout: str = LAYOUT) -> tuple[bytes, int]:
        """Join; return the session's token, and the last request that the hub has."""
        self.send(self.header(MessageKind.HELLO), RUN.encode(), layout.encode(), token)
        header, payload = self.receive(MessageKind.WELCOME)
        return payload[:8], header.sequence

    def receive(self, *kinds: MessageKind) -> tuple[FrameHeader, bytes]:
        """Return the next message of these kinds."""
        while True:
            frame, payload = self._socket.recv_multipart()
            header = unpack(frame, payload)
            if header.kind in kinds:
                return header, payload

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def served(hub) -> tuple[Started, int]:
    return hub(workers=2, nbytes=NBYTES)


@pytest.fixture
def raw(served) -> Iterator[Raw]:
    one = Raw(served[1])
    yield one
    one.close()


def finished(worker, hub: Started, port: int, *numbers: int) -> list[dict]:
    """Run correct workers until the hub ends; return the lines that it printed."""
    for number in numbers:
        outcome(worker(port, steps=3, nbytes=NBYTES, worker=number))
    told = outcome(hub)
    for number in numbers:
        assert told[-1]["states"][str(number)] == expected(number, 3, NBYTES)
    return told


def num_executed(told: list[dict], worker: int = 0) -> int:
    return sum(one["executed"][0] == worker for one in told if "executed" in one)


def test_a_repeated_request_is_answered_again_but_not_executed(worker, served, raw):
    hub, port = served
    raw.join()
    raw.push(1)
    first = raw.receive(MessageKind.REPLY)[0]
    raw.push(1)
    assert raw.receive(MessageKind.REPLY)[0] == first
    raw.push(2, acknowledged=1)
    assert raw.receive(MessageKind.REPLY)[0].sequence == 2
    raw.push(1, acknowledged=2)  # of this one the hub knows no more than that it was executed
    raw.push(2, acknowledged=2)
    raw.push(3, acknowledged=2)
    assert raw.receive(MessageKind.REPLY)[0].sequence == 3
    raw.send(raw.header(MessageKind.BYE))
    told = finished(worker, hub, port, 1)
    assert num_executed(told) == 3


def test_a_session_resumes_over_another_connection_without_half_a_message(worker, served, raw):
    hub, port = served
    token, highest = raw.join()
    assert highest == 0
    raw.push(1)
    raw.receive(MessageKind.REPLY)
    parts = (b"x" * (NBYTES - 1),)
    message = Message("push", parts=parts)
    complete = next(split(raw.header(MessageKind.REQUEST, 2), message))
    half = replace(unpack(*complete), offset=0)
    raw.frames(pack(half, parts[0][:1000]), parts[0][:1000])
    raw.close()
    again = Raw(port)
    assert again.join(token) == (token, 1)
    assert again.receive(MessageKind.REPLY)[0].sequence == 1  # it may not have arrived
    again.push(2, acknowledged=1)
    assert again.receive(MessageKind.REPLY)[0].sequence == 2
    again.send(again.header(MessageKind.BYE))
    again.close()
    told = finished(worker, hub, port, 1)
    assert num_executed(told) == 2
    assert [one["joined"] for one in told if "joined" in one] == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("too large", "more than"),
        ("too many", "whose replies have not arrived"),
        ("not the next piece", "was to follow"),
        ("of another run", "another run or worker"),
        ("of another worker", "another run or worker"),
        ("a hub's", "which no worker sends"),
        ("least step", ""),
    ],
)
def test_a_message_that_is_not_allowed_resets_the_connection(
    worker, served, raw, wrong: str, said: str
):
    hub, port = served
    token, _ = raw.join()
    num_done = 0
    if wrong == "too large":
        big = FrameHeader(MessageKind.REQUEST, NONCE, 0, 1, topic="push", sizes=(1 << 39,))
        raw.frames(pack(big, b"x" * PIECE_NBYTES), b"x" * PIECE_NBYTES)
    elif wrong == "too many":
        for sequence in range(1, 10):
            raw.push(sequence)
        num_done = 8
    elif wrong == "not the next piece":
        late = raw.header(MessageKind.REQUEST, 1, topic="push", sizes=(1000,), offset=500)
        raw.frames(pack(late, b"x" * 500), b"x" * 500)
    elif wrong == "of another run":
        raw.send(replace(raw.header(MessageKind.REQUEST, 1), nonce=b"otherrun"), b"x")
    elif wrong == "of another worker":
        raw.send(replace(raw.header(MessageKind.REQUEST, 1), worker=1), b"x")
    elif wrong == "a hub's":
        raw.send(raw.header(MessageKind.WELCOME, 1), b"x")
    else:  # not wrong at all, but the least that there is
        raw.send(raw.header(MessageKind.REQUEST, 1), topic="push")
        least = raw.header(
            MessageKind.REQUEST, 2, 1, step=-(2**63), version=2**63 - 1, topic="push"
        )
        raw.frames(pack(least, b""), b"")
        raw.receive(MessageKind.REPLY)
        assert raw.receive(MessageKind.REPLY)[0].step == -(2**63)
        num_done = 2
    if said:
        raw.receive(MessageKind.RESET)
    again = Raw(port)
    wait_s = time.monotonic() + 30
    assert again.join(token) == (token, num_done)
    assert time.monotonic() < wait_s
    while num_done and again.receive(MessageKind.REPLY)[0].sequence < num_done:
        pass  # what the hub has, it also executes: a worker that leaves before would forgo it
    again.send(again.header(MessageKind.BYE))
    again.close()
    told = finished(worker, hub, port, 1)
    assert num_executed(told) == num_done
    assert any(said in one.get("said", "") for one in told)


def test_a_worker_of_another_version_is_told_so(worker, served, raw):
    hub, port = served
    header = bytearray(pack(raw.header(MessageKind.HELLO), b""))
    header[4] = 7
    raw.frames(bytes(header) + b"and more", b"whatever it says")
    _, text = raw.receive(MessageKind.REFUSED)
    assert b"the hub speaks version 1, this worker 7" in text
    told = finished(worker, hub, port, 0, 1)
    assert any("this worker 7" in one.get("said", "") for one in told)


def peak_of(pid: int) -> int:
    """Return the peak of a process's resident memory in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def send_garbage(port: int, rng: random.Random) -> None:
    """Send bytes that are not ZeroMQ's protocol, or only begin like it."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    huge = b"\x02" + (1 << 40).to_bytes(8, "big")
    for begin in (b"", greeting, greeting + ready[:9], greeting + ready, greeting + ready + huge):
        with socket.create_connection(("127.0.0.1", port), 5) as one, suppress(OSError):
            one.settimeout(0.5)
            one.sendall(begin + rng.randbytes(rng.choice((1, 100, 100_000))))


def send_hostile(raw: Raw, rng: random.Random) -> None:
    """Send frames that are wrong, each in another way."""
    good = raw.header(MessageKind.REQUEST, 1, topic="push", sizes=(PIECE_NBYTES,))
    payload = rng.randbytes(PIECE_NBYTES)
    frame = pack(good, payload)
    at = rng.randrange(HEADER_NBYTES)
    corrupted = frame[:at] + bytes([frame[at] ^ (1 + rng.randrange(255))]) + frame[at + 1 :]
    for frames in (
        (rng.randbytes(PIECE_NBYTES),),
        (rng.randbytes(rng.randrange(400)), payload),
        (frame[:at], payload),
        (corrupted, payload),
        (frame, payload[:-1]),
        (frame, payload, payload),
        (frame,) * 50,
        (b"",),
        (b"", b""),
        (frame, payload),  # right, but of nobody who has joined
        (pack(replace(good, kind=MessageKind.HELLO), payload), payload),
        (pack(replace(good, sizes=(1 << 40,)), payload), payload),
        (pack(replace(good, kind=MessageKind.HELLO, sizes=(1 << 40,)), payload), payload),
    ):
        raw.frames(*frames)


def test_hostile_bytes_neither_stop_the_hub_nor_fill_its_memory(worker, served):
    """Strangers send hundreds of MiB while a worker trains; the hub grows by a fraction of that."""
    hub, port = served
    rng = random.Random(7)
    honest = worker(port, steps=60, nbytes=NBYTES, worker=1)
    assert line_of(honest) == {"joined": True}
    before = peak_of(hub.process.pid)
    for _ in range(6):
        send_garbage(port, rng)
        strangers = [Raw(port) for _ in range(2)]
        for raw in strangers:
            for _ in range(4):
                send_hostile(raw, rng)
            raw.frames(bytes(MAX_GROWTH))  # which has ZeroMQ close the connection
            raw.close()
    growth = peak_of(hub.process.pid) - before

    assert growth < MAX_GROWTH
    outcome(honest)
    told = finished(worker, hub, port, 0)
    assert told[-1]["states"]["1"] == expected(1, 60, NBYTES)
    assert told[-1]["refused"] > NUM_HOSTILE // 2
    said = [one["said"] for one in told if "said" in one]
    assert 0 < len(said) < NUM_HOSTILE // 20  # and not a line for each
