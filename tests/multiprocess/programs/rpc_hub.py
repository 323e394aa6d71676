"""A hub that keeps a state per worker, and prints every push that it executes as a line of JSON.

With a state file it resumes where an earlier hub was killed. It ends when `workers` workers have
left.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from paceline.rpc.frames import Message
from paceline.rpc.keys import load_hub_keys
from paceline.rpc.limits import Limits
from paceline.rpc.server import Joined, Lost, RpcRequest, Server

sys.path.insert(0, sys.argv[1])  # the tests' own folder

from rpc_exchange import LAYOUT, RUN, first_state, next_state, stretched


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class TellLog(logging.Handler):
    """A handler that prints each message as a line of JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(said=record.getMessage())


def main() -> None:
    logging.getLogger("paceline.rpc").addHandler(TellLog())
    options = json.loads(sys.argv[2])
    nbytes, num_workers = options["nbytes"], options["workers"]
    keys = load_hub_keys(Path(options["keys"])) if options.get("keys") else None
    states = {worker: (0, first_state(worker)) for worker in range(num_workers)}
    kept = Path(options["state"]) if options.get("state") else None
    if kept is not None and kept.exists():
        saved = json.loads(kept.read_text())
        states = {int(w): (steps, bytes.fromhex(state)) for w, (steps, state) in saved.items()}
    server = Server(
        f"tcp://127.0.0.1:{options['port']}",
        Limits(
            RUN,
            LAYOUT,
            num_workers=num_workers,
            max_message_nbytes=max(nbytes, 64),
            settings=b'{"some": "settings"}',
            reconnect_timeout_s=options.get("reconnect_timeout_s", 30.0),
        ),
        keys=keys,
    )
    tell(address=server.address)
    num_left = 0
    while num_left < num_workers:
        event = server.receive(60.0)
        if event is None:
            sys.exit("no event for a minute")
        if isinstance(event, Joined):
            tell(joined=event.worker)
        elif isinstance(event, Lost):
            tell(lost=event.worker, why=event.why)
            num_left += event.why == "has left"
        else:
            execute(server, event, states, nbytes)
            if kept is not None and event.message.topic == "push":
                saved = {w: (steps, state.hex()) for w, (steps, state) in states.items()}
                kept.with_suffix(".new").write_text(json.dumps(saved))
                kept.with_suffix(".new").replace(kept)
    server.close()
    states_now = {worker: state.hex() for worker, (_, state) in states.items()}
    sent, received = server.sent_nbytes, server.received_nbytes
    tell(states=states_now, sent=sent, received=received, refused=server.refusals.num_total)


def execute(
    server: Server, request: RpcRequest, states: dict[int, tuple[int, bytes]], nbytes: int
) -> None:
    steps, state = states[request.worker]
    message = request.message
    if message.topic == "fetch":
        parameters = stretched(state, nbytes)
        half = nbytes // 2
        parts = (parameters[:half], b"", parameters[half:])
        server.reply(request, Message("fetch", message.step, steps, "none", parts))
        return
    states[request.worker] = (steps + 1, next_state(state, b"".join(message.parts)))
    tell(executed=[request.worker, message.step], version=message.version)
    server.reply(request, Message("push", message.step, steps + 1))


if __name__ == "__main__":
    main()
