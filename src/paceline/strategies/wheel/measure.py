"""Measure the hub of a run, and make the plan's machine of what its workers have measured."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

import torch

from paceline.core.strategy import PricedMachine
from paceline.core.workload import Workload
from paceline.links.clock import clock_for
from paceline.measure.device_profile import DeviceProfile, profile_device
from paceline.measure.profiled_machine import ProfiledDevices
from paceline.record.recorder import LayerMarks
from paceline.record.worker_trace import WorkerRecorder
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.job import (
    TrainingJob,
    Updating,
    activations_of,
    layers_in,
    lent_head,
    model_and_halves,
)
from paceline.strategies.wheel.lent import COPIES
from paceline.strategies.wheel.server import ParameterServer
from paceline.training.data.batch import Batch


def profile_head(job: TrainingJob, updating: Updating) -> DeviceProfile:
    """Return the hub's profile, of answers and updates, with a model of its own."""
    spec, device = job.spec, job.device
    model, halves = model_and_halves(spec, job.recipe, job.kept_on)
    optimizer = updating.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # so that each round computes the same
    server = ParameterServer(
        *(model, halves, optimizer),
        num_workers=1,
        staleness=None,
        learning=updating.learning,
        checks_values=spec.pace is None,
        lent=lent_head(replace(job, halves=halves)),
    )
    server.workers.add(0)
    clock = clock_for(device)
    marks = LayerMarks(layers_in(server.answering_model, halves.head_names), clock)
    recorder = WorkerRecorder(0, "hub", marks, clock)
    server.watch = lambda worker, step, kind: recorder.work(step, kind, *COPIES.get(kind, ()))
    rows = [row % job.num_samples for row in range(ceil(spec.batch_size / spec.num_parts))]
    batch = Batch.of(job.recipe.samples.__getitems__(rows))
    targets = batch.to(device).targets
    with torch.no_grad():
        activations = activations_of(halves, batch.to(job.kept_on).inputs, updating.learning)
    activations = activations.to(device)
    gradients = torch.zeros_like(server.body_parameters()[1])

    def run_step(number: int) -> None:
        version = server.version
        server.answer(0, number, version, activations, targets, 1.0)
        server.update(0, number, version, gradients)

    return profile_device(
        device, spec.config.codecs.values(), run_step, recorder.trace.spans, spec.profile_s
    )


def calibrate(
    workload: Workload,
    config: Wheel,
    hub: DeviceProfile,
    workers: Mapping[int, DeviceProfile],
    *,
    is_paced: bool,
) -> PricedMachine | None:
    """Return the machine and its prices; None if a device's first worker has no profile.

    In a tree the root's workers are child hubs, and `workers` have what these have told.
    """
    profiles, hub_of = {0: hub}, dict[int, int]()
    for i, (number, own) in enumerate(config.workers_by_hub.items()):
        bodies = config.devices_of(own)
        if config.child_hubs:
            if i not in workers:
                return None
            profiles[number], hub_of[number] = workers[i], 0
            found: list[DeviceProfile | None] = [*workers[i].below]
        else:
            found = [workers.get(one) for one in bodies.values()]
        for device, body in zip(bodies, found, strict=True):
            if body is None:
                return None
            profiles[device], hub_of[device] = body, number if config.child_hubs else 0
    computing = tuple(config.workers_by_device)
    return ProfiledDevices(profiles, hub_of, computing, is_paced).calibrated(workload)
