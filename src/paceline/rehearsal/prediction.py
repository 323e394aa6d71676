"""What a rehearsal should take: the exchange and the stand-in's layers, each measured by itself."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn

from paceline.core.apportion import apportion
from paceline.core.cost import Measured
from paceline.core.plan import Kind, Plan
from paceline.core.strategy import Window
from paceline.models.paced import QUEUED_S, PacedSGD
from paceline.planner import Forecast, forecast
from paceline.rehearsal.setup import REAL_SGD, Setup
from paceline.strategies import find_exchange, probers
from paceline.training.profile import Profile, profile

_PROFILE_S = 2.0
_LAYERS = (Kind.FORWARD, Kind.BACKWARD)
Key = tuple[str, Kind, str]
Durations = Mapping[Key, float]


def measure(setup: Setup) -> Profile:
    """Return this machine's exchange, and the times of the layers that are to be rehearsed.

    Paced layers take a little longer than what they stand for, and ranks of them are late by turns:
    both are measured, as real layers are.
    """
    settings, group = setup.settings, setup.group
    own = profile(
        setup.model,
        setup.workload,
        lambda: repeat(setup.share),
        partial(_optimizer, setup),
        group,
        _PROFILE_S,
        probers({settings.strategy: settings.config()}, group),
    )
    if setup.times is not None:
        return own
    names = [device.name for device in own.machine.devices]
    slower = {name: settings.stretch_of(rank) for rank, name in enumerate(names)}
    durations = _slowed(own.durations, slower)
    if settings.balance is not None:
        durations = _slowed(durations, _parts_of_equal(names, durations, settings.batch_size))
    return replace(own, durations=durations)


def _optimizer(setup: Setup, model: nn.Module) -> torch.optim.Optimizer:
    if setup.times is None:
        return REAL_SGD.optimizer(model)
    return PacedSGD(model.parameters(), setup.times.update_s)


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

    What is left of these layers begins when the copy ends; a copy that is longer than what is
    queued delays all of them.
    """
    durations = dict(cost.durations)
    copied, behind = defaultdict[str, float](float), defaultdict[str, float](float)
    for task in plan.tasks:
        owner = task.on[0].owner
        if task.kind is Kind.D2H:
            copied[owner] += cost.seconds(task)
        elif task.kind is Kind.BACKWARD:
            key, copy_s = (owner, task.kind, task.part), copied.pop(owner, 0.0)
            late = copy_s > max(durations[key], QUEUED_S)
            behind[owner] = 0.0 if late else behind[owner] + copy_s
            made_up = min(behind[owner], durations[key])
            behind[owner] -= made_up
            durations[key] -= made_up
    return replace(cost, durations=durations)
