"""Open and close both ends many times; print how many descriptors and threads there are."""

import json
import sys
import threading
from pathlib import Path

from paceline.wire import Client, Identity, Joined, Message, Request, Service

LAYOUT = "0" * 64
NBYTES = 16 << 20


def once(port: int) -> None:
    service = Service(
        f"tcp://127.0.0.1:{port}",
        "run",
        LAYOUT,
        keys=None,
        num_workers=1,
        largest_nbytes=NBYTES,
        settings=b"",
        say=lambda text: None,
    )
    client = Client(
        service.address,
        Identity("run", LAYOUT, 0),
        keys=None,
        deadline_s=30,
        say=lambda text: None,
    )
    assert service.receive(30) == Joined(0)
    reply_to = client.request(Message("small"))
    request = service.receive(30)
    assert isinstance(request, Request)
    service.reply(request, Message("answer", parts=(b"yes",)))
    assert bytes(reply_to.result().parts[0]) == b"yes"
    client.request(Message("never received", parts=(bytes(NBYTES),)))
    client.close()
    service.close()
    service.close()


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
