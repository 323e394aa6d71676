"""A worker that in each step fetches its state from the hub, and pushes bytes made of it."""

import hashlib
import json
import logging
import sys
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.rpc.client import Client, HubRestarted
from paceline.rpc.frames import Message
from paceline.rpc.keys import load_worker_keys
from paceline.rpc.limits import Identity

sys.path.insert(0, sys.argv[1])  # the tests' own folder

from rpc_exchange import LAYOUT, RUN, push_of


def main() -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO)  # to standard error
    options = json.loads(sys.argv[2])
    keys = load_worker_keys(Path(options["keys"])) if options.get("keys") else None
    identity = Identity(
        options.get("run", RUN), options.get("layout", LAYOUT), options.get("worker", 0)
    )
    client = Client(
        f"tcp://127.0.0.1:{options['port']}",
        identity,
        keys=keys,
        deadline_s=options.get("deadline_s", 60.0),
    )
    assert json.loads(client.settings) == {"some": "settings"}
    print(json.dumps({"joined": True}), flush=True)
    num_restarts = 0
    while True:
        try:
            if step(client, options["steps"], options["nbytes"]):
                break
        except HubRestarted:
            num_restarts += 1
    client.close()
    sent, received = client.sent_nbytes, client.received_nbytes
    print(json.dumps({"restarts": num_restarts, "sent": sent, "received": received}))


def step(client: Client, steps: int, nbytes: int) -> bool:
    """Do the next step of the hub; return True if all steps are done."""
    fetched = client.request(Message("fetch")).result()
    if fetched.version == steps:
        return True
    push = push_of(b"".join(fetched.parts), nbytes)
    digest = hashlib.sha256(push).digest()
    third = nbytes // 3
    view = memoryview(push)
    message = Message(
        "push", fetched.version, fetched.version, "none", (view[:third], view[third:])
    )
    pending = client.request(message)
    assert pending.result().version == fetched.version + 1
    assert hashlib.sha256(push).digest() == digest
    return False


if __name__ == "__main__":
    try:
        main()
    except PacelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
