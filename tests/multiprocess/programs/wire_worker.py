"""A worker that fetches its state from the hub and pushes what it makes of it, step by step."""

import hashlib
import json
import sys
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.wire import Client, HubRestarted, Identity, Message, load_client

sys.path.insert(0, sys.argv[1])  # the tests' own folder

from wires import LAYOUT, RUN, push_of


def main() -> None:
    options = json.loads(sys.argv[2])
    keys = load_client(Path(options["keys"])) if options.get("keys") else None
    identity = Identity(
        options.get("run", RUN), options.get("layout", LAYOUT), options.get("worker", 0)
    )
    client = Client(
        f"tcp://127.0.0.1:{options['port']}",
        identity,
        keys=keys,
        deadline_s=options.get("deadline_s", 60.0),
        say=lambda text: print(text, file=sys.stderr, flush=True),
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
    counts = {
        topic: [count.sent, count.sent_nbytes, count.received, count.received_nbytes]
        for topic, count in client.traffic.by_topic().items()
    }
    client.close()
    sent = client.traffic.sent_nbytes
    print(json.dumps({"restarts": num_restarts, "traffic": counts, "sent": sent}))


def step(client: Client, steps: int, nbytes: int) -> bool:
    """Do the step that the hub says is next; return whether all are done."""
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
