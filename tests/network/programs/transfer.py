"""Time a TCP transfer between two hosts with one rank each: transfer.py one|both NBYTES.

Rank 0 sends to rank 1, or both ranks send to each other, and each receiver answers with a byte.
Rank 0 prints the seconds.
"""

import os
import socket
import sys
import time
from contextlib import suppress
from threading import Thread

IS_FIRST = os.environ["RANK"] == "0"
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def connected() -> socket.socket:
    """Connect rank 1 to rank 0, which listens."""
    if IS_FIRST:
        with socket.create_server(ADDRESS) as server:
            return server.accept()[0]
    while True:
        with suppress(ConnectionRefusedError):  # the other host does not listen yet
            return socket.create_connection(ADDRESS, timeout=None)
        time.sleep(0.02)


way, nbytes = sys.argv[1], int(sys.argv[2])
sent = bytes(nbytes) if IS_FIRST or way == "both" else b""
to_receive = nbytes if not IS_FIRST or way == "both" else 0
with connected() as connection, connection.makefile("rb") as stream:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    started = time.perf_counter()
    sender = Thread(target=connection.sendall, args=(sent,))
    sender.start()
    assert len(stream.read(to_receive)) == to_receive
    sender.join()
    if to_receive:
        connection.sendall(b"x")
    if sent:
        assert stream.read(1) == b"x"
    if IS_FIRST:
        print(time.perf_counter() - started)
