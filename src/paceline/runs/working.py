"""Work for a hub: on another machine, or as one of torchrun's ranks, of which one leads.

rank 0   hub (this process) + worker 0 (a child)
rank 1   worker 1 (this process)
"""

import json
import logging
import os
import signal
import socket
import threading
from contextlib import ExitStack
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from paceline.core.errors import InvalidInput
from paceline.devices import device_named, gpus
from paceline.links import processes
from paceline.links.group import Group
from paceline.records.settings import strategy_of
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.keys import generate_keys
from paceline.rpc.workers import connected, listed
from paceline.runs.restarts import RunRequest
from paceline.runs.session import go_through
from paceline.strategies import find_runnable

logger = logging.getLogger(__name__)
_KEY_MODE = 0o600
_LEAVING_S = 5.0  # for a worker that is done to end


def work(settings: WorkerProcessSettings) -> None:
    """Work for the hub, as the workers of these settings, until its run is over.

    Raises InvalidInput if they cannot take part, WorkerLost if the hub is gone too long.
    """
    if settings.device is not None:
        device_named(settings.device)  # or InvalidInput, before anybody is waited for
    with connected(settings, settings.numbers, settings.keys) as clients:
        name = json.loads(clients[settings.numbers[0]].settings)["strategy"]
        strategy = find_runnable(name)
        if strategy.worker is None:
            raise InvalidInput("strategy", f"the hub has {name}, which has no workers of elsewhere")
        import_module(strategy.worker).take_part(settings, clients)
    logger.info("workers %s: done", listed(settings.numbers))


def lead_or_work(request: RunRequest, group: Group) -> None:
    """Do this rank's part of a run with a hub: rank 0 leads, and all ranks are its workers.

    The hub's address, and keys for other machines, are told over the group.
    """
    strategy = strategy_of(request.settings)
    assert strategy.worker is not None
    with ExitStack() as stack:
        address = _address() if group.rank == 0 else ""
        folder, keys = None, {}
        if group.rank == 0 and not _is_loopback(address):
            folder = _folder(stack)
            keys = _new_keys(folder)
        told = group.gather({"address": address, "keys": keys, "run": request.run_id})[0]
        if told["keys"] and folder is None:
            folder = _folder(stack)
            _write_keys(folder, told["keys"])
        settings = WorkerProcessSettings(
            connect=told["address"],
            run=told["run"],
            keys=folder,
            deadline_s=request.settings.deadline_s,
            workers=(group.rank,),
            device=_device(),
        )
        if group.rank:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the hub says when it is over
            work(settings)
            return
        command = processes.module_command(strategy.worker, settings.model_dump_json())
        child = processes.start(command, stdout=processes.STANDARD_ERROR)
        stack.callback(lambda: processes.end([child], wait_s=_LEAVING_S, termination_s=0.0))
        led = {"bind": told["address"], "keys": folder, "run": told["run"]}
        alone = Group.alone(torch.device("cpu"), request.settings.deadline_s)
        asked = request.model_copy(update={"settings": request.settings.model_copy(update=led)})
        go_through(asked, alone)


def _folder(stack: ExitStack) -> Path:
    """Make a folder for keys, which is removed at the end. A killed rank leaves it behind."""
    return Path(stack.enter_context(TemporaryDirectory(prefix="paceline-keys-")))


def _address() -> str:
    """Return an address of this machine at which ranks find torch's store, with a free port."""
    host = socket.gethostbyname(os.environ["MASTER_ADDR"])
    with socket.socket() as free:
        free.bind((host, 0))
        return f"tcp://{host}:{free.getsockname()[1]}"


def _is_loopback(address: str) -> bool:
    return ip_address(address.removeprefix("tcp://").rpartition(":")[0]).is_loopback


def _new_keys(folder: Path) -> dict[str, str]:
    """Write keys of a hub and its workers, and return the files that a worker needs."""
    for path in generate_keys(folder):
        logger.debug("%s", path)
    return {name: (folder / name).read_text() for name in ("hub.pub", "worker.key")}


def _write_keys(folder: Path, keys: dict[str, str]) -> None:
    for name, text in keys.items():
        path = folder / name
        path.touch(_KEY_MODE)
        path.write_text(text)


def _device() -> str:
    """Return the device of this rank: a GPU of its own, if there are any."""
    found = gpus()
    if not found:
        return "cpu"
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= len(found):
        raise InvalidInput("workers", f"this machine has {len(found)} GPUs, and rank {rank} none")
    return str(found[rank])
