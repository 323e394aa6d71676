"""Measure the hub's device; build the machine for plans from measured devices and links."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

import torch

from paceline.core.plan import Kind, Lane
from paceline.core.strategy import PricedMachine
from paceline.core.wire_format import Purpose
from paceline.core.workload import Workload
from paceline.links.clock import clock_for
from paceline.links.devices import device_of
from paceline.measure.device_profile import (
    DeviceProfile,
    ProfiledDevices,
    device_name,
    profile_device,
)
from paceline.record.recorder import LayerMarks
from paceline.record.worker_trace import ALL_STEPS, WorkerRecorder
from paceline.strategies.wheel import job as jobs
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.server import ParameterServer
from paceline.training.data.batch import Batch

# The copies in a hub's answer to a worker. The values are what is copied, and the copy's lane (row)
# in the trace.
_COPIES = {
    Kind.H2D: (Purpose.HEAD_PARAMETERS, Lane.H2D),
    Kind.D2H: (Purpose.HEAD_GRADIENTS, Lane.D2H),
}


def recorders_of(server: ParameterServer, window: range = ALL_STEPS) -> list[WorkerRecorder]:
    """Record the work of the hub (head and updates); return a recorder for each worker's steps.

    `window`: the numbers of the steps to record.
    """
    model = server.model if server.lent is None else server.lent.model
    marks = LayerMarks(jobs.layers_in(model, server.halves.head_names), clock_for(server.device))
    name, workers = device_name(device_of(server.device).kind, 0), range(len(server.workers.all))
    recorders = [WorkerRecorder(one, name, marks, window) for one in workers]
    server.watch = lambda worker, step, kind: recorders[worker].work(
        step, kind, *_COPIES.get(kind, ())
    )
    return recorders


def profile_head(job: jobs.TrainingJob) -> DeviceProfile:
    """Measure head, updates, copies and codecs on the hub's device, with a copy of the model."""
    spec, device = job.spec, job.device
    model, halves = jobs.model_and_halves(spec, job.recipe, device)
    optimizer = job.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # measured steps must not change the parameters
    options = jobs.server_options(replace(job, halves=halves))
    server = ParameterServer(model, halves, optimizer, **options)
    server.workers.add(0)
    recorder, *_ = recorders_of(server)
    samples, size = job.recipe.samples, ceil(spec.batch_size / spec.num_parts)
    batch = Batch.of(samples.__getitems__([row % len(samples) for row in range(size)]))
    targets = batch.to(device).targets
    with torch.no_grad():
        inputs = batch.to(job.kept_on).inputs
        activations = jobs.activations_of(halves, inputs, job.learning).to(device)
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
    """Return the measured machine and its cost model; None if a device was not measured.

    `hub`: the measured speed of the hub's device. `workers`: the measurements by the first worker
    of each device; in a tree, by the child hubs. `is_paced`: True in rehearsals (layers sleep).
    """
    profiles, hub_of = {0: hub}, dict[int, int]()
    by_device = config.workers_by_device
    for i, (number, workers_of_hub) in enumerate(config.workers_by_hub.items()):
        bodies = {one: own[0] for one, own in by_device.items() if own[0] in workers_of_hub}
        if not workers.keys() >= ({i} if config.child_hubs else {*bodies.values()}):
            return None
        if config.child_hubs:
            profiles[number], hub_of[number], found = workers[i], 0, workers[i].below
        else:
            found = tuple(workers[one] for one in bodies.values())
        profiles.update(zip(bodies, found, strict=True))
        hub_of.update(dict.fromkeys(bodies, number))
    return ProfiledDevices(profiles, hub_of, tuple(by_device), is_paced).calibrated(workload)
