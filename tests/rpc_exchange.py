"""An exchange between hub and workers with a known result, and a network that fails."""

import hashlib
import json
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

from processes import Started

TESTS = str(Path(__file__).parent)
PROGRAMS = Path(__file__).parent / "multiprocess" / "programs"
LAYOUT = hashlib.sha256(b"a model").hexdigest()
RUN = "a-run"
MIB = 1 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stretched(seed: bytes, nbytes: int) -> bytes:
    """Return bytes that depend on every bit of the seed."""
    return hashlib.shake_128(seed).digest(nbytes)


def first_state(worker: int) -> bytes:
    return hashlib.sha256(b"worker %d" % worker).digest()


def next_state(state: bytes, push: bytes) -> bytes:
    return hashlib.sha256(state + push).digest()


def push_of(parameters: bytes, nbytes: int) -> bytes:
    """Return what a worker pushes after it fetched these parameters."""
    return stretched(b"gradients" + hashlib.sha256(parameters).digest(), nbytes)


def expected(worker: int, steps: int, nbytes: int) -> str:
    """Return the state after all steps of an undisturbed exchange."""
    state = first_state(worker)
    for _ in range(steps):
        state = next_state(state, push_of(stretched(state, nbytes), nbytes))
    return state.hex()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def line_of(started: Started) -> dict[str, Any]:
    """Return the next line that a program prints."""
    told: dict[str, Any] = json.loads(started.process.stdout.readline())
    return told


def outcome(started: Started) -> list[dict[str, Any]]:
    """Return the lines of a program that ended well."""
    done = started.finish(60)
    assert done.code == 0, done.err + done.out
    assert "Traceback" not in done.err, done.err
    return lines(done.out)


def executed(told: list[dict[str, Any]], worker: int = 0) -> list[int]:
    """Return the steps of a worker in the order in which the hub executed them."""
    done = [one["executed"] for one in told if "executed" in one]
    return [step for number, step in done if number == worker]


class Proxy:
    """A proxy of a local port that can be cut, stopped and slowed down."""

    def __init__(self, target: int, pause_s: float = 0.0) -> None:
        self._target, self._pause_s = target, pause_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._flows = threading.Event()
        self._flows.set()
        self._is_closed = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.num_connections = 0
        self.num_bytes = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stop(self) -> None:
        """Hold back all data, but keep the connections: a partition."""
        self._flows.clear()

    def go_on(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Break all connections, and accept new ones."""
        with self._lock:
            for one in self._open:
                shut_down(one)

    def wait_for(self, num_bytes: int, deadline_s: float = 30.0) -> None:
        """Wait until `num_bytes` more have gone through."""
        until_s, begin = time.monotonic() + deadline_s, self.num_bytes
        while self.num_bytes - begin < num_bytes:
            assert time.monotonic() < until_s, f"{self.num_bytes - begin} bytes came through"
            time.sleep(0.005)

    def close(self) -> None:
        self._is_closed = True
        self._flows.set()
        shut_down(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            if not select.select([self._listener], [], [], 0.1)[0]:
                continue
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            try:
                other = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                one.close()
                continue
            self.num_connections += 1
            with self._lock:
                self._open |= {one, other}
            for source, target in ((one, other), (other, one)):
                thread = threading.Thread(target=self._forward, args=(source, target), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while not self._is_closed:
                if not select.select([source], [], [], 0.1)[0]:
                    continue
                data = source.recv(65536)
                self._flows.wait()
                time.sleep(self._pause_s)
                if not data:
                    break
                target.sendall(data)
                self.num_bytes += len(data)
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._open -= {source, target}
            shut_down(source)
            shut_down(target)
            source.close()


def shut_down(one: socket.socket) -> None:
    """Shut a socket down, so that a thread that waits for it returns."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
