"""Time TCP transfers between two hosts with one rank each; rank 0 prints the seconds.

probe.py one|both NBYTES REPEATS
"""

import json
import os
import socket
import sys
import time
from threading import Thread

_CHUNK = 1 << 18
_PATIENCE_S = 30.0
_IS_FIRST = os.environ["RANK"] == "0"


def connect() -> socket.socket:
    """Connect rank 1 to rank 0, which listens."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if _IS_FIRST:
        with socket.create_server(address) as server:
            connection, _ = server.accept()
    else:
        until_s = time.monotonic() + _PATIENCE_S
        while (connection := _dialled(address)) is None:  # the other host is not listening yet
            if time.monotonic() > until_s:
                raise TimeoutError("rank 0 does not listen")
            time.sleep(0.02)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _dialled(address: tuple[str, int]) -> socket.socket | None:
    try:
        return socket.create_connection(address, timeout=None)
    except ConnectionRefusedError:
        return None


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
    if _IS_FIRST:
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


def main(way: str, nbytes: int, repeats: int) -> None:
    """Repeat a transfer; rank 0 prints the seconds of each repeat as JSON."""
    data, transfer = bytes(nbytes), both_ways if way == "both" else one_way
    seconds = []
    with connect() as connection:
        for _ in range(repeats):
            started = time.perf_counter()
            transfer(connection, data)
            seconds.append(time.perf_counter() - started)
    if _IS_FIRST:
        print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
