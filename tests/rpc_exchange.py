"""An exchange between a hub and workers with a known result, and a faulty network.

python rpc_exchange.py WORKERS NBYTES    run a hub until the end of standard input
"""

import hashlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import zmq

from paceline.rpc import frames
from paceline.rpc.client import Client
from paceline.rpc.frames import FrameHeader, Message, MessageKind
from paceline.rpc.keys import HubKeys, WorkerKeys
from paceline.rpc.limits import RELEASE, Limits
from paceline.rpc.server import Joined, Lost, RpcRequest, Server
from processes import beside

RUN, SETTINGS = "a-run", b'{"some": "settings"}'
MIB = 1 << 20
DEADLINE_S = 55.0  # for hanging exchanges


class Clock:
    """A clock that a test advances; each reading also advances it by `tick_s`."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self.tick_s = 1000.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def until(is_so: Callable[[], object]) -> None:
    """Wait until a condition becomes true."""
    until_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def stretched(seed: bytes, nbytes: int = 32) -> bytes:
    """Expand a seed to `nbytes` pseudo-random bytes."""
    return hashlib.shake_128(seed).digest(nbytes)


def expected(worker: int, steps: int, nbytes: int) -> tuple[int, bytes]:
    """Return the state after all steps of an undisturbed exchange."""
    state = stretched(b"worker %d" % worker)
    for _ in range(steps):
        parameters = stretched(state, nbytes)
        state = stretched(state + stretched(parameters, nbytes))
    return steps, state


def limits_of(workers: int = 1, nbytes: int = 1000) -> Limits:
    return Limits(RUN, workers, max(nbytes, 64), SETTINGS)


class Closed(AbstractContextManager):
    """Calls `close` at the end of a `with` block."""

    def __exit__(self, *_: object) -> None:
        self.close()


class Hub(Closed):
    """A hub in a thread: a fetch returns a worker's state, and a push computes the next state.

    `ends_after`: the hub ends after this number of pushes, without a reply to the last push.
    """

    def __init__(
        self,
        workers: int = 1,
        nbytes: int = 1000,
        keys: HubKeys | None = None,
        ends_after: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.states = {worker: expected(worker, 0, 0) for worker in range(workers)}
        self.executed: list[tuple[int, int]] = []  # worker, step
        self.joined: list[int] = []
        self.lost: list[tuple[int, str]] = []
        self._nbytes, self._ends_after, self._is_closed = nbytes, ends_after, False
        allowed = limits_of(workers, nbytes)
        self.server = Server("tcp://127.0.0.1:0", allowed, keys=keys, clock=clock)
        self.port = int(self.server.address.rpartition(":")[2])
        self.ended = beside(self._serve)

    def check_done(self, steps: int) -> None:
        """Assert that all workers have completed each step once."""
        for worker, state in self.states.items():
            assert self.steps_of(worker) == list(range(steps))
            assert state == expected(worker, steps, self._nbytes)

    def steps_of(self, worker: int = 0) -> list[int]:
        return [step for number, step in self.executed if number == worker]

    def close(self) -> None:
        self.server.close()
        self._is_closed = True
        self.ended.result(DEADLINE_S)

    def _serve(self) -> None:
        while len(self.executed) != self._ends_after:
            match self.server.receive(0.1):
                case None if self._is_closed:
                    return
                case Joined(worker):
                    self.joined.append(worker)
                case Lost(worker, why):
                    self.lost.append((worker, why))
                case RpcRequest() as request:
                    self._execute(request)

    def _execute(self, request: RpcRequest) -> None:
        (steps, state), message = self.states[request.worker], request.message
        if message.topic == "fetch":
            parameters, half = stretched(state, self._nbytes), self._nbytes // 2
            parts = (parameters[:half], b"", parameters[half:])
            reply = Message("fetch", message.step, steps, parts)
        else:
            self.states[request.worker] = steps + 1, stretched(state + b"".join(message.parts))
            self.executed.append((request.worker, message.step))
            reply = Message("push", message.step, steps + 1)
        if len(self.executed) != self._ends_after:
            self.server.reply(request, reply)


class Ended(NamedTuple):
    """The bytes that a finished worker has sent and received."""

    sent: int
    received: int


def client_of(
    port: int,
    worker: int = 0,
    run: str = RUN,
    keys: WorkerKeys | None = None,
    deadline_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
) -> Client:
    """Return a joined client."""
    address = f"tcp://127.0.0.1:{port}"
    return Client(address, run, worker, keys=keys, deadline_s=deadline_s, clock=clock)


def work(port: int, steps: int = 3, nbytes: int = 1000, **options: Any) -> Ended:
    """In each step, fetch the state from the hub, and push bytes computed from the state."""
    with closing(client_of(port, **options)) as client:
        assert client.settings == SETTINGS
        while not _step(client, steps, nbytes):
            pass
    return Ended(client.sent_nbytes, client.received_nbytes)


def _step(client: Client, steps: int, nbytes: int) -> bool:
    """Take the next step; return True if all steps are complete."""
    fetched = client.request(Message("fetch")).result()
    if fetched.version == steps:
        return True
    view, third = memoryview(stretched(b"".join(fetched.parts), nbytes)), nbytes // 3
    step = fetched.version
    pushed = client.request(Message("push", step, step, (view[:third], view[third:])))
    assert pushed.result().version == step + 1
    return False


class Raw(Closed):
    """A worker whose frames a test chooses."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.sndhwm = 4  # limits the frames that the hub has not received yet
        self._socket.sndtimeo = self._socket.rcvtimeo = int(1000 * DEADLINE_S)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def frames(self, *sent: bytes) -> None:
        self._socket.send_multipart(sent)

    def send(self, header: FrameHeader, *parts: bytes, topic: str = "") -> None:
        for piece in frames.split(header, Message(topic, parts=parts)):
            self.frames(piece.frame, piece.payload)

    def push(self, sequence: int) -> None:
        self.send(FrameHeader(MessageKind.REQUEST, sequence=sequence), b"a push", topic="push")

    def half_a_push(self, sequence: int, nbytes: int) -> None:
        """Send the first half of a push of `nbytes` bytes."""
        message = Message("push", parts=(bytes(nbytes),))
        whole = next(frames.split(FrameHeader(MessageKind.REQUEST, sequence=sequence), message))
        part = bytes(nbytes // 2)
        self.frames(frames.pack(replace(frames.unpack(*whole), offset=0), part), part)

    def join(self, token: bytes = bytes(8)) -> tuple[bytes, int]:
        """Join; return the session's token, and the number of the hub's last request."""
        self.hello(token)
        header, payload = self.receive(MessageKind.WELCOME)
        return payload[:8], header.sequence

    def hello(self, token: bytes = bytes(8), release: str = RELEASE) -> None:
        self.send(FrameHeader(MessageKind.HELLO), RUN.encode(), release.encode(), token)

    def receive(self, kind: MessageKind) -> tuple[FrameHeader, bytes]:
        """Return the next message of this kind."""
        while True:
            frame, payload = self._socket.recv_multipart()
            header = frames.unpack(frame, payload)
            if header.kind is kind:
                return header, payload

    def close(self) -> None:
        self._socket.close()


class Proxy(Closed):
    """A proxy of a local port that can be cut, stopped and slowed down."""

    def __init__(self, target: int, pause_s: float = 0.0) -> None:
        self._target, self._pause_s = target, pause_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._flows = threading.Event()
        self._flows.set()
        self._open: set[socket.socket] = set()
        self.num_connections = self.num_bytes = 0
        beside(self._accept)

    def stop(self) -> None:
        """Stop forwarding, but keep the connections: a network partition."""
        self._flows.clear()

    def go_on(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Break all connections, and accept new ones."""
        for one in tuple(self._open):
            shut_down(one)

    def wait_for(self, num_bytes: int) -> None:
        """Wait until `num_bytes` further bytes are forwarded."""
        begin = self.num_bytes
        until(lambda: self.num_bytes - begin >= num_bytes)

    def close(self) -> None:
        self.go_on()
        shut_down(self._listener)
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                one, _ = self._listener.accept()
                try:
                    other = socket.create_connection(("127.0.0.1", self._target), 5)
                except OSError:
                    one.close()
                    continue
                other.settimeout(None)
                self.num_connections += 1
                self._open |= {one, other}
                beside(self._forward, one, other)
                beside(self._forward, other, one)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                time.sleep(self._pause_s)
                target.sendall(data)
                self.num_bytes += len(data)
        self._open.discard(source)
        shut_down(target)


def shut_down(one: socket.socket) -> None:
    """Shut a socket down, so that a thread blocked on it returns."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def main() -> None:
    workers, nbytes = map(int, sys.argv[1:])
    with Hub(workers, nbytes) as hub:
        print(json.dumps(hub.port), flush=True)
        sys.stdin.read()
    print(json.dumps({"refused": hub.server.refusals.num_total}))


if __name__ == "__main__":
    main()
