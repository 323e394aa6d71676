"""Run a child hub: a hub that is a worker of another hub, the parent.

The parent defines the model, data, batch size and epochs. The root of the tree of hubs saves the
trained model. In a rehearsal, the root starts the child hubs as processes of this module.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from paceline.core.outcome import Traffic, Updates
from paceline.core.settings import Record
from paceline.exchange.session import Progress
from paceline.rpc.client import Client
from paceline.rpc.workers import retry_after_restart, run_as_process
from paceline.strategies.wheel import job as jobs
from paceline.strategies.wheel.child_server import ChildServer
from paceline.strategies.wheel.config import RunSpec
from paceline.strategies.wheel.epochs import EpochLog
from paceline.strategies.wheel.hub import Hub
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.remote import ChildSettings
from paceline.strategies.wheel.tree import ParentHub, traffic_of

logger = logging.getLogger(__name__)


class ChildResult(Record):
    """The updates and bytes of one child hub.

    `updates`: counts of the updates by this hub's workers. `num_pushed`: the number of mean
    gradients that this hub sent to its parent. `traffic`: the bytes exchanged with its workers and
    child hubs, by purpose. `parent_traffic`: the bytes exchanged with its parent.
    `wire_nbytes`, `parent_wire_nbytes`: the bytes sent and received, with headers. `lost`: the
    reasons why workers were lost.
    """

    settings: ChildSettings
    model: str
    num_pushed: int
    updates: Updates
    traffic: tuple[Traffic, ...]
    parent_traffic: tuple[Traffic, ...]
    wire_nbytes: tuple[int, int]
    parent_wire_nbytes: tuple[int, int]
    lost: tuple[str, ...]


def take_part(
    settings: ChildSettings, clients: Mapping[int, Client], progress: Progress | None = None
) -> ChildResult:
    """Serve this hub's workers until all steps are done; return the hub's updates and bytes.

    Raises InvalidInput if the parent rejects this hub, or if the parent's run does not fit this
    machine. Raises WorkerLost if the parent does not answer in time, or if no worker is left.
    """
    client, progress = clients[settings.number], progress or Progress()
    parent_spec = RunSpec.from_json(client.settings)
    job = jobs.child_job(settings, parent_spec)
    spec, config = job.spec, job.spec.config
    own = spec.model, settings.number, settings.connect, config.workers, config.lanes
    logger.info("%s: worker %d of the hub at %s; hub of %d workers, %d per device", *own)
    layout = jobs.layout_of(parent_spec, job.halves, job.recipe, job.batches)
    server = ChildServer(
        *(job.model, job.halves),
        **jobs.server_options(job),
        parent=ParentHub(client, layout),
        num_steps=spec.num_steps,
    )
    # Without an address to listen on, which only rehearsals allow, the hub starts all workers on
    # this machine's CPU, because these workers mostly sleep.
    devices = ("cpu",) * len(config.workers_by_device) if settings.listen is None else ()
    with ExitStack() as stack:
        stack.callback(server.close)
        log = EpochLog(job, progress)
        hub = Hub(stack, settings, settings.run_name, job, server, log, devices=devices)
        server.wake = hub.rpc.wake
        profile = hub.wait_for_workers()
        if profile is not None:
            below = [hub.answers.profiles[one[0]] for one in config.workers_by_device.values()]
            retry_after_restart(
                partial(server.parent.measure, profile, below, job.workload.gradient_nbytes)
            )
        server.begin()
        hub.train()
        server.finish(None if spec.pace is None else hub.answers.report())
        wire_nbytes = hub.close()
    return ChildResult(
        settings=settings,
        model=spec.model,
        num_pushed=server.parent.counts[Topic.WHOLE_GRADIENTS],
        updates=server.updates,
        traffic=hub.answers.traffic(),
        parent_traffic=traffic_of(server.parent.counts, server, job.workload.gradient_nbytes),
        wire_nbytes=wire_nbytes,
        parent_wire_nbytes=(client.sent_nbytes, client.received_nbytes),
        lost=tuple(hub.group.lost),
    )


def main() -> None:
    """Run a child hub with the JSON settings in `sys.argv[1]`; forked processes call this, too."""
    run_as_process(take_part, ChildSettings)


if __name__ == "__main__":
    main()
