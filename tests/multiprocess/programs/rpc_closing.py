"""Open and close a server and a client many times; print the open descriptors and threads."""

import json
import sys
import threading
from pathlib import Path

from paceline.rpc.client import Client
from paceline.rpc.frames import Message
from paceline.rpc.limits import Identity, Limits
from paceline.rpc.server import Joined, RpcRequest, Server

LAYOUT = "0" * 64
NBYTES = 16 << 20


def once(port: int) -> None:
    server = Server(
        f"tcp://127.0.0.1:{port}",
        Limits("run", LAYOUT, num_workers=1, max_message_nbytes=NBYTES, settings=b""),
        keys=None,
    )
    client = Client(server.address, Identity("run", LAYOUT, 0), keys=None, deadline_s=30)
    assert server.receive(30) == Joined(0)
    reply_to = client.request(Message("small"))
    request = server.receive(30)
    assert isinstance(request, RpcRequest)
    server.reply(request, Message("answer", parts=(b"yes",)))
    assert bytes(reply_to.result().parts[0]) == b"yes"
    client.request(Message("never received", parts=(bytes(NBYTES),)))
    client.close()
    server.close()
    server.close()


def left() -> list[int]:
    return [len(list(Path("/proc/self/fd").iterdir())), threading.active_count()]


def main() -> None:
    once(int(sys.argv[1]))
    before = left()
    for _ in range(8):
        once(int(sys.argv[1]))
    print(json.dumps({"before": before, "after": left()}))


if __name__ == "__main__":
    main()
