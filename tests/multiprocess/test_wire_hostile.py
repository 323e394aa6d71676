"""A hub that is sent what it should not be: it drops it, says so, and goes on with the others."""

import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from paceline.wire.frames import HEADER_NBYTES, PIECE_NBYTES, Header, Kind, pack, unpack
from paceline.wire.identity import nonce_of
from paceline.wire.messages import Message, pieces
from processes import Started
from wires import LAYOUT, RUN, expected, line_of, outcome

NBYTES = 100_000
NUM_STRANGE = 6 * 2 * 4 * 13  # wrong messages
MOST_GROWTH = 32 << 20  # of which the queues of the connections may take 8 MiB each


class Raw:
    """A worker that says what a test wants."""

    def __init__(self, port: int, worker: int = 0) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.sndhwm = 4  # so that the hub has got all but the last when this goes on
        self._socket.sndtimeo = self._socket.rcvtimeo = 20_000
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.worker = worker

    def header(self, kind: Kind, sequence: int = 0, arrived: int = 0, **more) -> Header:
        return Header(kind, nonce_of(RUN), self.worker, sequence, arrived, **more)

    def frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def say(self, header: Header, *parts: bytes, topic: str = "") -> None:
        for piece in pieces(header, Message(topic, parts=parts)):
            self.frames(piece.frame, piece.payload)

    def push(self, sequence: int, arrived: int = 0, payload: bytes = b"a push") -> None:
        self.say(self.header(Kind.REQUEST, sequence, arrived), payload, topic="push")

    def join(self, token: bytes = bytes(8), layout: str = LAYOUT) -> tuple[bytes, int]:
        """Return the session's token, and the last request that the hub has."""
        self.say(self.header(Kind.HELLO), RUN.encode(), layout.encode(), token)
        header, payload = self.hear(Kind.WELCOME)
        return payload[:8], header.sequence

    def hear(self, *kinds: Kind) -> tuple[Header, bytes]:
        """The next message of these kinds."""
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
    """Let proper workers do their steps, and the hub end; return what it has told."""
    for number in numbers:
        outcome(worker(port, steps=3, nbytes=NBYTES, worker=number))
    told = outcome(hub)
    for number in numbers:
        assert told[-1]["states"][str(number)] == expected(number, 3, NBYTES)
    return told


def num_executed(told: list[dict], worker: int = 0) -> int:
    return sum(one["executed"][0] == worker for one in told if "executed" in one)


def test_a_request_that_comes_again_is_answered_again_but_not_executed(worker, served, raw):
    hub, port = served
    raw.join()
    raw.push(1)
    first = raw.hear(Kind.REPLY)[0]
    raw.push(1)
    assert raw.hear(Kind.REPLY)[0] == first
    raw.push(2, arrived=1)
    assert raw.hear(Kind.REPLY)[0].sequence == 2
    raw.push(1, arrived=2)  # of this one the hub knows no more than that it was executed
    raw.push(2, arrived=2)
    raw.push(3, arrived=2)
    assert raw.hear(Kind.REPLY)[0].sequence == 3
    raw.say(raw.header(Kind.BYE))
    told = finished(worker, hub, port, 1)
    assert num_executed(told) == 3


def test_a_session_goes_on_over_another_connection_without_what_was_half_sent(worker, served, raw):
    hub, port = served
    token, highest = raw.join()
    assert highest == 0
    raw.push(1)
    raw.hear(Kind.REPLY)
    parts = (b"x" * (NBYTES - 1),)
    message = Message("push", parts=parts)
    whole = next(pieces(raw.header(Kind.REQUEST, 2), message))
    half = replace(whole.header, offset=0)
    raw.frames(pack(half, parts[0][:1000]), parts[0][:1000])
    raw.close()
    again = Raw(port)
    assert again.join(token) == (token, 1)
    assert again.hear(Kind.REPLY)[0].sequence == 1  # it may not have arrived
    again.push(2, arrived=1)
    assert again.hear(Kind.REPLY)[0].sequence == 2
    again.say(again.header(Kind.BYE))
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
def test_what_a_worker_may_not_send_resets_its_connection(
    worker, served, raw, wrong: str, said: str
):
    hub, port = served
    token, _ = raw.join()
    num_done = 0
    if wrong == "too large":
        big = Header(Kind.REQUEST, nonce_of(RUN), 0, 1, topic="push", sizes=(1 << 39,))
        raw.frames(pack(big, b"x" * PIECE_NBYTES), b"x" * PIECE_NBYTES)
    elif wrong == "too many":
        for sequence in range(1, 10):
            raw.push(sequence)
        num_done = 8
    elif wrong == "not the next piece":
        late = raw.header(Kind.REQUEST, 1, topic="push", sizes=(1000,), offset=500)
        raw.frames(pack(late, b"x" * 500), b"x" * 500)
    elif wrong == "of another run":
        raw.say(replace(raw.header(Kind.REQUEST, 1), run=b"otherrun"), b"x")
    elif wrong == "of another worker":
        raw.say(replace(raw.header(Kind.REQUEST, 1), worker=1), b"x")
    elif wrong == "a hub's":
        raw.say(raw.header(Kind.WELCOME, 1), b"x")
    else:  # not wrong at all, but the least that there is
        raw.say(raw.header(Kind.REQUEST, 1), topic="push")
        least = raw.header(Kind.REQUEST, 2, 1, step=-(2**63), version=2**63 - 1, topic="push")
        raw.frames(pack(least, b""), b"")
        raw.hear(Kind.REPLY)
        assert raw.hear(Kind.REPLY)[0].step == -(2**63)
        num_done = 2
    if said:
        raw.hear(Kind.RESET)
    again = Raw(port)
    wait_s = time.monotonic() + 10
    assert again.join(token) == (token, num_done)
    assert time.monotonic() < wait_s
    while num_done and again.hear(Kind.REPLY)[0].sequence < num_done:
        pass  # what the hub has, it also executes: a worker that leaves before would forgo it
    again.say(again.header(Kind.BYE))
    again.close()
    told = finished(worker, hub, port, 1)
    assert num_executed(told) == num_done
    assert any(said in one.get("said", "") for one in told)


def test_another_version_is_told_so(worker, served, raw):
    hub, port = served
    header = bytearray(pack(raw.header(Kind.HELLO), b""))
    header[4] = 7
    raw.frames(bytes(header) + b"and more", b"whatever it says")
    _, text = raw.hear(Kind.REFUSED)
    assert b"the hub speaks version 1, this worker 7" in text
    told = finished(worker, hub, port, 0, 1)
    assert any("this worker 7" in one.get("said", "") for one in told)


def peak_of(pid: int) -> int:
    """The most memory in bytes that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def garbage(port: int, rng: random.Random) -> None:
    """Send what is not even ZeroMQ's protocol, or begins like it."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    huge = b"\x02" + (1 << 40).to_bytes(8, "big")
    for begin in (b"", greeting, greeting + ready[:9], greeting + ready, greeting + ready + huge):
        with socket.create_connection(("127.0.0.1", port), 5) as one, suppress(OSError):
            one.settimeout(0.5)
            one.sendall(begin + rng.randbytes(rng.choice((1, 100, 100_000))))


def strange(raw: Raw, rng: random.Random) -> None:
    """Send frames that are wrong in every way that there is."""
    good = raw.header(Kind.REQUEST, 1, topic="push", sizes=(PIECE_NBYTES,))
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
        (pack(replace(good, kind=Kind.HELLO), payload), payload),
        (pack(replace(good, sizes=(1 << 40,)), payload), payload),
        (pack(replace(good, kind=Kind.HELLO, sizes=(1 << 40,)), payload), payload),
    ):
        raw.frames(*frames)


def test_hostile_bytes_neither_end_the_hub_nor_take_its_memory(worker, served):
    """Hundreds of MiB of strangers while a worker works; the hub may grow by a fraction of that."""
    hub, port = served
    rng = random.Random(7)
    honest = worker(port, steps=60, nbytes=NBYTES, worker=1)
    assert line_of(honest) == {"joined": True}
    before = peak_of(hub.process.pid)
    for _ in range(6):
        garbage(port, rng)
        strangers = [Raw(port) for _ in range(2)]
        for raw in strangers:
            for _ in range(4):
                strange(raw, rng)
            raw.frames(bytes(MOST_GROWTH))  # which has ZeroMQ close the connection
            raw.close()
    growth = peak_of(hub.process.pid) - before

    assert growth < MOST_GROWTH
    outcome(honest)
    told = finished(worker, hub, port, 0)
    assert told[-1]["states"]["1"] == expected(1, 60, NBYTES)
    assert told[-1]["refused"] > NUM_STRANGE // 2
    said = [one["said"] for one in told if "said" in one]
    assert 0 < len(said) < NUM_STRANGE // 20  # and not a line for each
