"""What a rehearsal should take: the exchange measured here, beside the layers' own times."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

from paceline.core.apportion import apportion
from paceline.core.cost import Measured
from paceline.core.machine import Machine
from paceline.core.pace import LayerTimes
from paceline.core.plan import Cost, Kind, Plan
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.links.group import Group
from paceline.planner import Forecast, forecast
from paceline.rehearsal.setup import REAL_SGD, Setup
from paceline.strategies import find_exchange, probers
from paceline.training.exchanges import measure_exchanges
from paceline.training.profile import Profile, profile
from paceline.training.this_machine import Speed, this_machine

_PROFILE_S = 2.0
_LAYERS = (Kind.FORWARD, Kind.BACKWARD)
Key = tuple[str, Kind, str]
Durations = Mapping[Key, float]


def measure(setup: Setup) -> Profile:
    """Return this machine's exchange, and the times of the layers that are to be rehearsed."""
    settings, group = setup.settings, setup.group
    probes = probers({settings.strategy: settings.config()}, group)
    if setup.times is not None:
        machine = _paced_machine(setup.workload, setup.times, group)
        exchanges = measure_exchanges(setup.workload, group, probes, machine)
        durations = {
            (device.name, kind, part): seconds
            for device in machine.devices
            for kind, part, seconds in _parts(setup.workload, setup.times)
        }
        return Profile(machine, durations, exchanges)
    own = profile(
        setup.model,
        setup.workload,
        lambda: repeat(setup.share),
        REAL_SGD,
        group,
        _PROFILE_S,
        probes,
    )
    names = [device.name for device in own.machine.devices]
    slower = {name: settings.stretch_of(rank) for rank, name in enumerate(names)}
    durations = _slowed(own.durations, slower)
    if settings.balance is not None:
        durations = _slowed(durations, _parts_of_equal(names, durations, settings.batch_size))
    return replace(own, durations=durations)


def _slowed(durations: Durations, times: Mapping[str, float]) -> dict[Key, float]:
    """Return what layers take on devices that need so many times as long for them."""
    return {
        key: seconds * (times[key[0]] if key[1] in _LAYERS else 1.0)
        for key, seconds in durations.items()
    }


def _parts_of_equal(
    devices: Sequence[str], durations: Durations, batch_size: int
) -> dict[str, float]:
    """Return each device's part of a balanced batch, in parts of an equal batch."""
    seconds = {
        name: sum(s for key, s in durations.items() if key[0] == name and key[1] in _LAYERS)
        for name in devices
    }
    parts = apportion(batch_size, [1 / own_s for own_s in seconds.values()])
    equal = -(-batch_size // len(devices))
    return {name: part / equal for name, part in zip(devices, parts, strict=True)}


def _parts(workload: Workload, times: LayerTimes) -> Iterator[tuple[Kind, str, float]]:
    yield Kind.LOAD, "", 0.0  # the one share is always there
    yield Kind.STEP, "", times.update_s
    for layer, forward_s, backward_s in zip(
        workload.layers, times.forward_s, times.backward_s, strict=True
    ):
        yield Kind.FORWARD, layer.name, forward_s
        yield Kind.BACKWARD, layer.name, backward_s


def _paced_machine(workload: Workload, times: LayerTimes, group: Group) -> Machine:
    """Return this machine with devices that are as fast as the paced ones, and named so."""
    work = sum((layer.forward + layer.backward for layer in workload.layers), Cost())
    seconds = sum(times.forward_s) + sum(times.backward_s)
    speed = Speed(work.flops / seconds, work.nbytes / seconds)
    machine = this_machine(group, [speed] * group.world_size)
    devices = tuple(
        device.model_copy(update={"name": f"paced{rank}"})
        for rank, device in enumerate(machine.devices)
    )
    return machine.model_copy(update={"devices": devices})


def predict(setup: Setup, measured: Profile, config: Any) -> Forecast:
    """Return what the strategy would take with that configuration."""
    strategy = find_exchange(setup.settings.strategy)
    machine, cost = measured.calibrated(strategy, config)
    # Layers that wait leave the cores to the exchange.
    links = tuple(link.model_copy(update={"uses_cores": False}) for link in machine.links)
    machine = machine.model_copy(update={"links": links})
    if setup.times is not None:
        plan = strategy.plan(setup.workload, machine, config, Window(1))
        cost = _beside_copies(plan, cost)
    samples = setup.settings.batch_size
    return forecast(setup.workload, machine, strategy, config, samples, cost)


def _beside_copies(plan: Plan, cost: Measured) -> Measured:
    """Let copies run beside the layers that follow them, as `models.paced` does.

    What is left of a layer begins when the copy ends; a copy that is longer delays all of it.
    """
    durations, copied = dict(cost.durations), defaultdict[str, float](float)
    for task in plan.tasks:
        owner = task.on[0].owner
        if task.kind is Kind.D2H:
            copied[owner] += cost.seconds(task)
        elif task.kind is Kind.BACKWARD:
            key, copy_s = (owner, task.kind, task.part), copied.pop(owner, 0.0)
            durations[key] -= copy_s if copy_s <= durations[key] else 0.0
    return replace(cost, durations=durations)
