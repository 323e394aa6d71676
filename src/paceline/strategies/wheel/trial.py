"""What the head and an update take on the hub's device, tried on a copy of the model."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from paceline.core.plan import Kind
from paceline.record.clock import clock_for
from paceline.record.marks import LayerMarks
from paceline.strategies.wheel.half import layers_in
from paceline.strategies.wheel.halves import Halves
from paceline.strategies.wheel.job import Job
from paceline.strategies.wheel.profile import Profile, profiled
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.trace import Trace

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def try_head(
    model: nn.Module, halves: Halves, job: Job, make: Make, samples: int, num_classes: int
) -> Profile:
    """Return the profile of the hub's device: answers to `samples`, and updates.

    `model` is a copy, which nobody else uses.
    """
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # whatever the gradients are, nothing grows
    looks = job.pace is None
    server = ParameterServer(model, halves, optimizer, num_workers=1, staleness=None, looks=looks)
    server.joined(0)
    device, dtype = halves.head_parameters[0].device, halves.head_parameters[0].dtype
    clock = clock_for(device)
    marks = LayerMarks(layers_in(model, halves.head_names), clock)
    trace = Trace(0, "hub", marks, clock, range(2**31))

    def watch(worker: int, step: int, kind: Kind) -> AbstractContextManager[None]:
        return trace.work(step, kind) if kind is Kind.STEP else trace.layers(step, kind)

    server.watch = watch
    activations = torch.rand(samples, *halves.crossing, dtype=dtype, device=device)
    labels = torch.arange(samples, device=device) % num_classes
    gradients = torch.zeros_like(server.body_parameters()[1])

    def round_of(number: int) -> None:
        version = server.version
        server.answer(0, number, version, activations, labels, 1.0)
        server.update(0, number, version, gradients)

    return profiled(device, job.config, round_of, trace.record.spans, job.profile_s)
