"""What stands in for the devices of a rehearsal: paced layers, or the real ones stretched."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from paceline.core.cost import Roofline, compute_lane
from paceline.core.errors import InvalidInput
from paceline.core.pace import LayerTimes, Totals, layer_times
from paceline.core.workload import Workload
from paceline.data.balanced import BalancedSampler
from paceline.links.group import Group
from paceline.machine_file import find_device
from paceline.models import find
from paceline.models.paced import PacedSGD, paced
from paceline.models.workload import workload_of
from paceline.settings import RehearseSettings
from paceline.training.step import SGD, Share

# Weights must not run away in steps that learn nothing: NaNs and denormals compute at other speeds.
REAL_SGD = SGD(learning_rate=1e-6)


@dataclass(frozen=True)
class Setup:
    """What stands in for a device on one rank, and what it does in each step.

    `times` are those that its layers stand for if it is paced.
    `share` is an equal part of the batch. Where batches are balanced, `whole` is all of it, and
    `batches` say how many samples of it this rank takes.
    """

    settings: RehearseSettings
    group: Group
    devices: str
    workload: Workload
    model: nn.Module
    optimizer: torch.optim.Optimizer
    share: Share
    times: LayerTimes | None
    whole: Share | None = None
    batches: BalancedSampler | None = None


def build(settings: RehearseSettings, group: Group) -> Setup:
    """Make what stands in for the device. InvalidInput if model, device or workers do not fit."""
    if group.world_size != settings.workers:
        raise InvalidInput(f"workers: {settings.workers} asked for, {group.world_size} started")
    size = -(-settings.batch_size // settings.workers)
    workload = workload_of(settings.model, size, settings.input_shape)
    if settings.device is not None:
        return _paced(settings, group, workload, settings.device)
    return _unstretched(settings, group, workload)


def _paced(settings: RehearseSettings, group: Group, workload: Workload, device: str) -> Setup:
    times, devices = times_of(settings, workload, device)
    model = paced(workload, *times)
    optimizer = PacedSGD(model.parameters(), times.update_s)
    # One sample of one class: its loss takes no time, and the model does not look at it.
    share = Share(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1.0)
    return Setup(settings, group, devices, workload, model, optimizer, share, times)


def times_of(settings: RehearseSettings, workload: Workload, device: str) -> tuple[LayerTimes, str]:
    """Return what layers take on the device of that name, and what stands for it."""
    known = find_device(device)
    rate = Roofline.of(known.machine).rates[compute_lane(known.device.name)]
    usual = layer_times(workload, rate)
    times = layer_times(workload, rate, _totals(settings, usual))
    return times, f"paced as {known.label}"


def _totals(settings: RehearseSettings, usual: LayerTimes) -> Totals:
    given = (settings.forward_ms, settings.backward_ms, settings.update_ms)
    otherwise = (sum(usual.forward_s), sum(usual.backward_s), usual.update_s)
    phases = zip(given, otherwise, strict=True)
    return Totals(*(seconds if ms is None else ms / 1e3 for ms, seconds in phases))


def _unstretched(settings: RehearseSettings, group: Group, workload: Workload) -> Setup:
    architecture = find(settings.model)
    torch.manual_seed(0)
    model = architecture.build(None).train()
    shape = settings.input_shape or architecture.input_shape
    assert shape is not None  # or the workload would not be known
    equal, size = workload.batch_size, settings.batch_size
    inputs = torch.randn(equal if settings.balance is None else size, *shape)
    targets = torch.randint(_num_classes(model, inputs, settings.model), (len(inputs),))
    assert settings.stretch is not None
    devices = f"stretched {', '.join(f'{times:g}' for times in settings.stretch)} times"
    optimizer, share = REAL_SGD.optimizer(model), Share(inputs[:equal], targets[:equal], 1.0)
    setup = Setup(settings, group, devices, workload, model, optimizer, share, None)
    if settings.balance is None:
        return setup
    batches = BalancedSampler(size, size, group.rank, group.world_size)
    return replace(setup, whole=Share(inputs, targets, 1.0), batches=batches)


@torch.no_grad()
def _num_classes(model: nn.Module, inputs: torch.Tensor, name: str) -> int:
    outputs = model.eval()(inputs[:1])
    model.train()
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
        shape = getattr(outputs, "shape", type(outputs).__name__)
        raise InvalidInput(f"model {name}: gives {shape}, but must give (batch, classes)")
    return outputs.shape[1]
