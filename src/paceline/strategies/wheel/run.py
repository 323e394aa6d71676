"""The runner of strategy wheel: the hub, and the body processes of this machine."""

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from math import isfinite

from torch import nn

from paceline.core.errors import InvalidInput
from paceline.links.group import Group, Member
from paceline.strategies.wheel.body import agreement
from paceline.strategies.wheel.branch import Branch, Uplink
from paceline.strategies.wheel.coding import check_codecs
from paceline.strategies.wheel.crew import Crew
from paceline.strategies.wheel.fit import device_name, devices_of, machine_of
from paceline.strategies.wheel.half import example_of, layout_of
from paceline.strategies.wheel.halves import Halves, cut
from paceline.strategies.wheel.heads import HeadWorkers
from paceline.strategies.wheel.hub import Hub
from paceline.strategies.wheel.job import Job
from paceline.strategies.wheel.keeping import Keeper
from paceline.strategies.wheel.order import Fitted, Run, job_of, largest_nbytes, resolved
from paceline.strategies.wheel.outcome import Outcome, outcome_of
from paceline.strategies.wheel.paced import stand_in
from paceline.strategies.wheel.profile import Profile
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.tally import Conduct, Status, Tally
from paceline.strategies.wheel.trial import try_head
from paceline.training.loop import Epoch, evaluate
from paceline.wire.service import Service


def train(run: Run) -> Outcome:
    """Train the run's model; its parameters are those of the server in the end.

    Raises InvalidInput if model, head, codecs and data do not fit each other, or a loss is not
    finite; WorkerLost if no worker is left.
    """
    run, parts = resolved(run)
    job, largest = job_of(run), largest_nbytes(parts, run.config)
    model, halves = _halved(run, run.model, job)
    run = replace(run, model=model)
    check_codecs(run.config, halves.head_parameters[0].dtype)
    layout, tally = layout_of(job, halves, run.data), Tally()
    branch = _branch(run, halves)
    server = branch or _server(run, halves)
    keeper = Keeper(
        run.snapshots, run.snapshot_s, server, run.run_id, sha256(layout.encode()).hexdigest()
    )
    if run.resume:
        run.say(keeper.resume(tally, run.steps_per_epoch))
    own = _tried(run, job) if run.profile_s else None
    heads = HeadWorkers(server, job, run.device, _name(run), largest)
    fits: list[Fitted | None] = []

    def begun(profiles: dict[int, Profile]) -> None:
        if branch:
            branch.begin()
        fits.append(_fitted(run, own, profiles))
        run.begun(fits[0])

    def look(status: Status) -> None:
        keeper.look(tally)
        run.look(status)

    with ExitStack() as stack:
        service = _service(run, job, largest)
        stack.callback(service.close)
        if branch:
            stack.callback(branch.close)
            branch.wake = service.wake
        crew = _crew(run, service.address, stack)
        conduct = _conduct(run, branch, crew, begun, look)
        run.prepared(service.address, crew.pids if crew else {})
        hub = Hub(service, server, heads, job, layout, run.steps_per_epoch, conduct, tally)
        hub.run()
        if branch:
            branch.finish()
        keeper.keep(tally)
        service.close()
        if crew:
            crew.leave()
        traffic = service.traffic.sent_nbytes, service.traffic.received_nbytes
    return outcome_of(run, parts, hub, server, heads, fits[0], job.num_traced, traffic)


def _conduct(
    run: Run,
    branch: Branch | None,
    crew: Crew | None,
    begun: Callable[[dict[int, Profile]], None],
    look: Callable[[Status], None],
) -> Conduct:
    """Return what the hub asks and tells while it serves."""
    return Conduct(
        test=lambda number, loss, seconds: _tested(run, number, loss, seconds),
        begun=begun,
        look=look,
        gone=crew.gone if crew else list,
        say=run.say,
        renew=branch.renew if branch else lambda: False,
        wait_s=run.wait_s,
        is_local=crew is not None,
    )


def _halved(run: Run, model: nn.Module, job: Job) -> tuple[nn.Module, Halves]:
    """Return the model on the hub's device, or what stands in for it, and its halves."""
    if job.pace is not None:
        return stand_in(job.model, job.first, job.pace)
    model.to(run.device).train()
    return model, cut(model, example_of(run.data).to(run.device), job.first)


def _tried(run: Run, job: Job) -> Profile:
    copied = run.model if job.pace is not None else copy.deepcopy(run.model)
    model, halves = _halved(run, copied, job)
    samples, classes = run.workload.batch_size, run.data.num_classes
    return try_head(model, halves, job, run.make, samples, classes)


def _server(run: Run, halves: Halves) -> ParameterServer:
    config = run.config
    trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    return ParameterServer(
        run.model,
        halves,
        run.make(trained),
        num_workers=config.workers,
        staleness=config.staleness,
        staleness_decay=config.staleness_decay,
        looks=run.pace is None,
    )


def _branch(run: Run, halves: Halves) -> Branch | None:
    """Return the server of a child hub, if this is one."""
    if run.parent is None:
        return None
    layout = layout_of(run.parent.job, halves, run.data)
    return Branch(
        run.model,
        halves,
        Uplink(run.parent.client, layout, run.say),
        num_workers=run.config.workers,
        staleness=run.config.staleness,
        gather=run.parent.gather,
        num_steps=run.num_steps,
        steps_per_epoch=run.steps_per_epoch,
    )


def _name(run: Run) -> str:
    return device_name("cpu" if run.device.type == "cpu" else "gpu", 0)


def _service(run: Run, job: Job, largest: int) -> Service:
    return Service(
        run.address,
        run.run_id,
        agreement(),
        keys=run.keys,
        num_workers=run.config.workers,
        largest_nbytes=largest,
        settings=job.packed(),
        say=run.say,
    )


def _crew(run: Run, address: str, stack: ExitStack) -> Crew | None:
    if run.devices is None:
        return None
    crew = Crew(address, run.run_id, run.config, run.devices, run.deadline_s)
    stack.callback(crew.close)
    return crew


def _fitted(run: Run, own: Profile | None, profiles: dict[int, Profile]) -> Fitted | None:
    """Return the machine, if all its devices were profiled."""
    lanes = devices_of(run.config)
    bodies = {n: profiles[own[0]] for n, own in lanes.items() if own[0] in profiles}
    if own is None or len(bodies) < len(lanes):
        return None
    return machine_of(run.workload, run.config, own, bodies)


def _tested(run: Run, number: int, loss: float, seconds: float) -> Epoch:
    if run.pace is not None or run.parent is not None:  # nothing was learnt, or not here
        return Epoch(number, loss, loss, 0.0, seconds)
    member = Member(0, os.getpid(), "", "", run.device.type)
    alone = Group(0, 1, run.device, (member,), None, None, run.deadline_s)
    test_loss, correct = evaluate(run.model, run.data.test, alone)
    num_samples = len(run.data.test)
    if not (isfinite(loss) and isfinite(test_loss)):
        raise InvalidInput(
            f"learning_rate: the training loss is {loss} and the test loss {test_loss} after epoch "
            f"{number + 1}; choose a smaller one"
        )
    epoch = Epoch(number, loss, test_loss / num_samples, correct / num_samples, seconds)
    run.report(epoch)
    return epoch
