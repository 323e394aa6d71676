"""The process of one device: it computes the bodies of its lanes, and talks to the hub for each.

`python -m paceline.strategies.wheel.body POST` is how a hub starts one on its own machine;
`paceline worker` does the same on another.
"""

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from paceline.core.errors import InvalidInput, PacelineError
from paceline.data import load
from paceline.native import die_with_parent
from paceline.strategies.wheel.fit import device_name
from paceline.strategies.wheel.half import BodyHalf
from paceline.strategies.wheel.job import PROTOCOL, Job, Topic
from paceline.strategies.wheel.lanes import Lane, Refused
from paceline.strategies.wheel.share import SampleShare
from paceline.strategies.wheel.turns import Stopped, Turns
from paceline.wire.client import Client
from paceline.wire.identity import Identity
from paceline.wire.keys import load_client
from paceline.wire.messages import Message

Say = Callable[[str], None]
_LOOK_S = 0.5


class Post(BaseModel):
    """Where a process works: for which hub, as which workers, on what device.

    `threads` are those that a CPU computes with; 0 leaves them as they are. A process of the hub's
    own machine ends with its `launcher`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str
    run_id: str
    workers: tuple[int, ...]
    device: str = "cpu"
    keys: Path | None = None
    deadline_s: float = 30.0
    threads: int = 0
    launcher: int | None = None


def agreement() -> str:
    """Return what hub and workers must have in common before they know of each other's run."""
    return sha256(f"{PROTOCOL}, paceline {version('paceline')}".encode()).hexdigest()


def work(post: Post, say: Say) -> None:
    """Train the post's workers until the hub's run is over.

    Raises InvalidInput if they cannot take part, WorkerLost if the hub is gone too long.
    """
    device = _device(post.device)
    keys = None if post.keys is None else load_client(post.keys)
    clients: dict[int, Client] = {}
    try:
        for worker in post.workers:
            identity = Identity(post.run_id, agreement(), worker)
            clients[worker] = Client(
                post.address, identity, keys=keys, deadline_s=post.deadline_s, say=say
            )
        try:
            _train(post, device, clients, say)
        except Refused:
            raise
        except Exception as error:
            tell_failure(clients, error)
            raise
    finally:
        for client in clients.values():
            client.close()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise InvalidInput(f"device: {name!r} cannot be used: {first}") from None
    return device


def tell_failure(clients: Mapping[int, Client], error: Exception) -> None:
    """Have the hub know why these workers end, if it is there."""
    by_input = int(isinstance(error, InvalidInput))
    message = Message(Topic.FAILED.value, by_input, parts=(_said(error).encode(),))
    for client in clients.values():
        with suppress(PacelineError):
            client.request(message).result()


def _said(error: Exception) -> str:
    """Return an error as one line."""
    return " ".join((str(error) if isinstance(error, PacelineError) else repr(error)).split())


def _train(post: Post, device: torch.device, clients: Mapping[int, Client], say: Say) -> None:
    job = Job.of(clients[post.workers[0]].settings)
    expected = tuple(job.workers_beside(post.workers[0]))
    if tuple(post.workers) != expected:
        raise InvalidInput(
            f"workers: {_listed(post.workers)} on one device, but with lanes={job.config.lanes} "
            f"of {job.config.workers} the hub expects {_listed(expected)} there"
        )
    if post.threads:
        torch.set_num_threads(post.threads)
    if job.pace is not None:  # nothing is computed, on whatever device
        device = torch.device("cpu")
    data = load(job.data, job.input_shape, job.seed)
    turns = Turns(post.workers)
    kind = "cpu" if device.type == "cpu" else "gpu"
    name = device_name(kind, 1 + post.workers[0] // job.config.lanes)
    with ThreadPoolExecutor(1, "paceline-load") as loader:
        lanes = [
            Lane(
                worker,
                client,
                BodyHalf(job, worker, device, name, data),
                SampleShare(
                    data, job.batch_size, job.part(worker), job.num_parts, job.epochs, job.seed
                ),
                job,
                turns,
                loader,
                say,
            )
            for worker, client in clients.items()
        ]
        if job.profile_s:
            lanes[0].profile()
        _run(lanes, turns)


def _run(lanes: list[Lane], turns: Turns) -> None:
    """Run all lanes to their end; the first failure ends them all."""
    failures: list[Exception] = []
    threads = torch.get_num_threads()

    def run(lane: Lane) -> None:
        torch.set_num_threads(threads)  # a setting of each thread
        try:
            lane.run()
        except Stopped:
            return
        except Exception as error:  # raised again below, in the main thread
            failures.append(error)
            turns.stop()

    running = [
        threading.Thread(target=run, args=(lane,), name=f"paceline-lane-{lane.worker}", daemon=True)
        for lane in lanes
    ]
    for thread in running:
        thread.start()
    for thread in running:
        while thread.is_alive():
            thread.join(_LOOK_S)
    if failures:
        raise failures[0]


def _listed(workers: tuple[int, ...]) -> str:
    return ",".join(map(str, workers))


def main() -> None:
    """Work as the only argument says; exit code 2 if the input is to blame, 1 for another error."""
    post = Post.model_validate_json(sys.argv[1])
    if post.launcher is not None:
        die_with_parent(post.launcher)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the hub gets it too, and ends us
    try:
        work(post, lambda text: print_line(text))
    except Exception as error:
        if not isinstance(error, Refused):
            print_line(f"{_listed(post.workers)}: {_said(error)}")
        sys.exit(2 if isinstance(error, InvalidInput) else 1)


def print_line(text: str) -> None:
    """Say something on standard error."""
    sys.stderr.write(f"paceline worker: {text}\n")


if __name__ == "__main__":
    main()
