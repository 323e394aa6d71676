"""Run workers for a hub on another machine."""

import json
import logging
from importlib import import_module

from paceline.core.errors import InvalidInput
from paceline.links.devices import device_named
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.workers import connected, listed
from paceline.strategies import find_runnable

logger = logging.getLogger(__name__)


def work(settings: WorkerProcessSettings) -> None:
    """Run the workers of these settings until the hub's run is over.

    Raises InvalidInput if the workers cannot join, WorkerLost if the hub stays unreachable.
    """
    if settings.device is not None:
        device_named(settings.device)  # check before connecting
    with connected(settings, settings.keys) as clients:
        name = json.loads(clients[settings.numbers[0]].settings)["strategy"]
        strategy = find_runnable(name)
        if strategy.running is None or strategy.running.remote is None:
            raise InvalidInput("strategy", f"{name} of the hub has no remote workers")
        working = import_module(strategy.running.remote).WORKING
        import_module(working).take_part(settings, clients)
    logger.info("workers %s: done", listed(settings.numbers))
