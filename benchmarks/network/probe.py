"""Time TCP transfers between two hosts with one rank each; rank 0 prints the seconds.

probe.py one|both NBYTES REPEATS
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from threading import Thread

_CHUNK = 1 << 18
_PATIENCE_S = 30.0


def connect() -> socket.socket:
    """Connect rank 1 to rank 0, which listens."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server:
            connection, _ = server.accept()
    else:
        connection = _dialled(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _dialled(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_connection(address, timeout=None)
        except ConnectionRefusedError:  # the other host is not listening yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def receive(connection: socket.socket, nbytes: int) -> None:
    """Receive and discard `nbytes` bytes."""
    room = bytearray(min(nbytes, _CHUNK))
    while nbytes:
        received = connection.recv_into(room, min(nbytes, _CHUNK))
        if not received:
            raise EOFError("the other host has closed the connection")
        nbytes -= received


def one_way(connection: socket.socket, data: bytes) -> None:
    """Send the data from rank 0 to rank 1, which answers with a byte."""
    if os.environ["RANK"] == "0":
        connection.sendall(data)
        receive(connection, 1)
    else:
        receive(connection, len(data))
        connection.sendall(b"x")


def both_ways(connection: socket.socket, data: bytes) -> None:
    """Send the data in both directions at once; each rank answers with a byte."""
    sender = Thread(target=connection.sendall, args=(data,))
    sender.start()
    receive(connection, len(data))
    sender.join()
    connection.sendall(b"x")
    receive(connection, 1)


WAYS: dict[str, Callable[[socket.socket, bytes], None]] = {"one": one_way, "both": both_ways}


def main(way: str, nbytes: int, repeats: int) -> None:
    """Repeat a transfer; rank 0 prints the seconds of each repeat as JSON."""
    data = bytes(nbytes)
    seconds = []
    with connect() as connection:
        for _ in range(repeats):
            started = time.perf_counter()
            WAYS[way](connection, data)
            seconds.append(time.perf_counter() - started)
    if os.environ["RANK"] == "0":
        print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
