"""Hostile peers: the hub drops and logs their messages, and continues to serve workers."""

import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import rpc_exchange
from paceline.rpc.frames import (
    HEADER_NBYTES,
    PIECE_NBYTES,
    PROTOCOL,
    FrameHeader,
    MessageKind,
    pack,
)
from rpc_exchange import DEADLINE_S, MIB, Hub, Raw, beside, expected, work

NBYTES = 100_000
NUM_HOSTILE = 6 * 2 * 4 * 13  # invalid messages sent
MAX_GROWTH = 32 << 20  # bytes; the queue of each connection may hold 8 MiB


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub that must still serve honest workers at the end."""
    with Hub(2, NBYTES) as hub:
        yield hub
        work(hub.port, 3, NBYTES, worker=1)
        assert hub.states[1] == expected(1, 3, NBYTES)


@pytest.fixture
def raw(hub) -> Iterator[Raw]:
    with Raw(hub.port) as one:
        yield one


@pytest.mark.parametrize(
    ("wrong", "num_done"),
    [
        (lambda raw: [raw.push(sequence) for sequence in range(1, 10)], 8),
        (lambda raw: raw.send(FrameHeader(MessageKind.WELCOME, sequence=1), b"x"), 0),
    ],
    ids=["too many", "hub only"],
)
def test_a_message_that_is_not_allowed_resets_the_connection(hub, raw, wrong, num_done: int):
    token, _ = raw.join()
    wrong(raw)
    raw.receive(MessageKind.RESET)
    with Raw(hub.port) as again:
        assert again.join(token) == (token, num_done)
        while num_done and again.receive(MessageKind.REPLY)[0].sequence < num_done:
            pass  # the hub executes all requests that it has received
    assert len(hub.steps_of()) == num_done
    assert hub.server.refusals.num_total == 1


def test_a_worker_of_another_version_is_refused_with_both_versions(hub, raw):
    header = bytearray(pack(FrameHeader(MessageKind.HELLO), b""))
    header[4] = 7
    raw.frames(bytes(header) + b"and more", b"whatever it says")
    text = raw.receive(MessageKind.REFUSED)[1].decode()
    assert {word for word in (str(PROTOCOL), "7") if word in text} == {str(PROTOCOL), "7"}
    assert hub.server.refusals.num_total == 1


def peak_of(pid: int) -> int:
    """Return the peak of a process's resident memory in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def send_garbage(port: int, rng: random.Random) -> None:
    """Send bytes that violate ZeroMQ's protocol, or only the beginning of its handshake."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    huge = b"\x02" + (1 << 40).to_bytes(8, "big")
    for begin in (b"", greeting, greeting + ready[:9], greeting + ready, greeting + ready + huge):
        with socket.create_connection(("127.0.0.1", port), 5) as one, suppress(OSError):
            one.settimeout(0.5)
            one.sendall(begin + rng.randbytes(rng.choice((1, 100, 100_000))))


def send_hostile(raw: Raw, rng: random.Random) -> None:
    """Send frames with one fault each."""
    good = FrameHeader(MessageKind.REQUEST, 0, 1, topic="push", sizes=(PIECE_NBYTES,))
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
        (frame, payload),  # valid, but from a client that has not joined
        (pack(replace(good, kind=MessageKind.HELLO), payload), payload),
        (pack(replace(good, sizes=(1 << 40,)), payload), payload),
        (pack(replace(good, kind=MessageKind.HELLO, sizes=(1 << 40,)), payload), payload),
    ):
        raw.frames(*frames)


def test_hostile_bytes_neither_stop_the_hub_nor_fill_its_memory():
    """Strangers send hundreds of MiB while a worker trains; the hub grows by a fraction of that."""
    rng, pipe = random.Random(7), subprocess.PIPE
    command = [sys.executable, rpc_exchange.__file__, "2", str(NBYTES)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as served:
        port = json.loads(served.stdout.readline())
        honest = beside(work, port, 60, NBYTES, worker=1)
        before = peak_of(served.pid)
        for _ in range(6):
            send_garbage(port, rng)
            for _ in range(2):
                with Raw(port) as raw:
                    for _ in range(4):
                        send_hostile(raw, rng)
                    raw.frames(bytes(32 * MIB))  # ZeroMQ closes the connection
        assert peak_of(served.pid) - before < MAX_GROWTH
        honest.result(DEADLINE_S)
        work(port, 3, NBYTES)
        out, err = served.communicate(timeout=DEADLINE_S)
    assert json.loads(out)["refused"] > NUM_HOSTILE // 2
    assert 0 < len(err.splitlines()) < NUM_HOSTILE // 20  # not one line per message
