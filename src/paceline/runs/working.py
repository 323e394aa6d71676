"""Work for the hub of another machine."""

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
    """Work for the hub, as the workers of these settings, until its run is over.

    Raises InvalidInput if they cannot take part, WorkerLost if the hub is gone too long.
    """
    if settings.device is not None:
        device_named(settings.device)  # or InvalidInput, before anybody is waited for
    with connected(settings, settings.keys) as clients:
        name = json.loads(clients[settings.numbers[0]].settings)["strategy"]
        strategy = find_runnable(name)
        if strategy.running is None or strategy.running.remote is None:
            raise InvalidInput("strategy", f"the hub has {name}, which has no workers of elsewhere")
        working = import_module(strategy.running.remote).WORKING
        import_module(working).take_part(settings, clients)
    logger.info("workers %s: done", listed(settings.numbers))
