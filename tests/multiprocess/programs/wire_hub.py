"""A hub that keeps a state per worker, and prints every push that it executes.

With a state file it goes on where the hub before it was killed. It ends when as many workers have
left as there are, or when told to on standard input's end.
"""

import json
import sys
from pathlib import Path
from typing import Any

from paceline.wire import Joined, Lost, Message, Request, Service, load_hub

sys.path.insert(0, sys.argv[1])  # the tests' own folder

from wires import LAYOUT, RUN, first_state, next_state, stretched


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    options = json.loads(sys.argv[2])
    nbytes, num_workers = options["nbytes"], options["workers"]
    keys = load_hub(Path(options["keys"])) if options.get("keys") else None
    states = {worker: (0, first_state(worker)) for worker in range(num_workers)}
    kept = Path(options["state"]) if options.get("state") else None
    if kept is not None and kept.exists():
        saved = json.loads(kept.read_text())
        states = {int(w): (steps, bytes.fromhex(state)) for w, (steps, state) in saved.items()}
    service = Service(
        f"tcp://127.0.0.1:{options['port']}",
        RUN,
        LAYOUT,
        keys=keys,
        num_workers=num_workers,
        largest_nbytes=max(nbytes, 64),
        settings=b'{"some": "settings"}',
        say=lambda text: tell(said=text),
        gone_after_s=options.get("gone_after_s", 30.0),
    )
    tell(address=service.address)
    num_left = 0
    while num_left < num_workers:
        event = service.receive(60.0)
        if event is None:
            sys.exit("nobody has said anything for a minute")
        if isinstance(event, Joined):
            tell(joined=event.worker)
        elif isinstance(event, Lost):
            tell(lost=event.worker, why=event.why)
            num_left += event.has_left
        else:
            execute(service, event, states, nbytes)
            if kept is not None and event.message.topic == "push":
                saved = {w: (steps, state.hex()) for w, (steps, state) in states.items()}
                kept.with_suffix(".new").write_text(json.dumps(saved))
                kept.with_suffix(".new").replace(kept)
    service.close()
    counts = {topic: vars_of(count) for topic, count in service.traffic.by_topic().items()}
    states_now = {worker: state.hex() for worker, (_, state) in states.items()}
    received, refused = service.traffic.received_nbytes, service.num_refused
    tell(states=states_now, traffic=counts, received=received, refused=refused)


def execute(
    service: Service, request: Request, states: dict[int, tuple[int, bytes]], nbytes: int
) -> None:
    steps, state = states[request.worker]
    message = request.message
    if message.topic == "fetch":
        parameters = stretched(state, nbytes)
        half = nbytes // 2
        parts = (parameters[:half], b"", parameters[half:])
        service.reply(request, Message("fetch", message.step, steps, "none", parts))
        return
    states[request.worker] = (steps + 1, next_state(state, b"".join(message.parts)))
    tell(executed=[request.worker, message.step], version=message.version)
    service.reply(request, Message("push", message.step, steps + 1))


def vars_of(count: Any) -> list[int]:
    return [count.sent, count.sent_nbytes, count.received, count.received_nbytes]


if __name__ == "__main__":
    main()
