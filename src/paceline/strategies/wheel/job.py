"""The job of a process: model, halves and data of a run, or the stand-ins of a rehearsal.

Every process builds the same ones from the run's `RunSpec`. Stand-ins take a body's and a head's
time and compute nothing: their values are all zeros.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.wire_format import Purpose
from paceline.core.workload import Workload
from paceline.data import load
from paceline.data.dataset import Batch, Dataset
from paceline.data.sampler import ShardedBatches
from paceline.devices import device_of, first_device
from paceline.exchange.session import TrainingSession
from paceline.links.group import boot_id
from paceline.models import describe, find
from paceline.models.factory import fitted, workload_of
from paceline.models.layers import LayerModule, layers_of
from paceline.models.paced import PacedModel, PacedSGD
from paceline.recipes.named import USUAL_DATA
from paceline.recipes.optimizers import OptimizerFactory, optimizer_for
from paceline.strategies.wheel.config import RunSpec, Wheel
from paceline.strategies.wheel.cut import Halves, cut
from paceline.strategies.wheel.remote import ChildSettings
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, Split, messages, pace_of, split

NUM_WARM_UP, NUM_LAST = 2, 1  # steps that are not measured; the last turns have no forward
_NUM_PACED_CLASSES = 2  # of the scores, which nobody looks at
_NUM_EXAMPLES = 2  # a batch norm needs two
_FLOAT32_NBYTES = 4
_MAX_TRACED, _NUM_COLD = 20, 2  # steps
_SPAN_NBYTES = 400  # as JSON
_MIN_MESSAGE_NBYTES = 4 << 20


class TrainingJob(NamedTuple):
    """The model that a hub trains, on its device, and its data.

    `workload` describes one worker's part of a step, `parts` its halves.
    """

    spec: RunSpec
    model: nn.Module
    halves: Halves
    data: Dataset
    workload: Workload
    parts: Split
    device: torch.device

    @property
    def layout(self) -> str:
        """The description that every worker's half must equal."""
        return layout_of(self.spec, self.halves, self.data)

    @property
    def steps_per_epoch(self) -> int:
        """The steps in which all samples are taken once."""
        return len(batches_of(self.spec, 0, len(self.data.train)))

    @property
    def max_message_nbytes(self) -> int:
        """The bytes that no message of the run exceeds."""
        sent = messages(self.parts, self.spec.config)
        together = sent[Purpose.LABELS].nbytes + sent[Purpose.ACTIVATIONS].nbytes
        num_spans = _MAX_TRACED * (2 * len(self.parts.body.layers) + len(Purpose))
        whole = self.parts.body.gradient_nbytes + self.parts.head.gradient_nbytes  # between hubs
        single = (sent[purpose].nbytes for purpose in (*TO_HUB, *FROM_HUB))
        most = max(together, num_spans * _SPAN_NBYTES, whole, *single)
        return max(_MIN_MESSAGE_NBYTES, most + most // 8)


def training_job(
    session: TrainingSession, settings: TrainSettings, device: torch.device
) -> tuple[TrainingJob, OptimizerFactory]:
    """Load the data, build the model and cut it. Raises InvalidInput if they do not fit."""
    make = optimizer_for(settings)
    model, data, name, num_classes, shape = fitted(
        settings.model, settings.data or USUAL_DATA, settings.seed
    )
    size = ceil(settings.batch_size / session.config.workers)
    workload = describe(model, torch.zeros(size, *data.sample_shape), settings.model)
    parts = split(workload, session.config)
    own = {
        "model": name,
        "num_classes": num_classes,
        "data": settings.data or USUAL_DATA,
        "input_shape": shape,
    }
    num_samples, epochs, seed = len(data.train), settings.epochs, settings.seed
    spec = _traced(session, parts, num_samples, epochs=epochs, seed=seed, **own)
    halves = cut_with(model, data, spec.head, device)
    return TrainingJob(spec, model, halves, data, workload, parts, device), make


def rehearsal_job(
    session: TrainingSession, settings: RehearseSettings
) -> tuple[TrainingJob, OptimizerFactory]:
    """Build stand-ins whose layers take the device's times; InvalidInput if it cannot be."""
    device = session.device
    if device is None:
        raise InvalidInput("device: name the device whose time layers take, as k40-gigabit/gpu0")
    size = ceil(settings.batch_size / session.config.workers)
    workload = workload_of(settings.model, size, settings.input_shape)
    parts = split(workload, session.config)
    times, is_gpu = device.times(workload), device.kind == DeviceKind.GPU
    pace = pace_of(parts, times, device.rate, is_gpu, settings.input_shape)
    num_samples = (NUM_WARM_UP + settings.steps + NUM_LAST) * settings.batch_size
    source = f"synthetic:1,classes={_NUM_PACED_CLASSES},samples={num_samples}"
    data = load(source)
    own = {"model": settings.model, "num_classes": None, "data": source, "input_shape": None}
    spec = _traced(session, parts, len(data.train), epochs=1, seed=0, pace=pace, **own)
    model, halves = stand_in(spec)
    job = TrainingJob(spec, model, halves, data, workload, parts, torch.device("cpu"))
    return job, lambda parameters: PacedSGD(parameters, pace.update_s)


def child_job(settings: ChildSettings, parent: RunSpec) -> TrainingJob:
    """Build the job that a child hub's parent describes; InvalidInput if it does not fit here."""
    if parent.pace is not None:
        raise InvalidInput(
            "connect: the hub there rehearses, and trees of hubs cannot be rehearsed"
        )
    place = (parent.part(settings.number), parent.num_parts)
    own = {"config": settings.config(parent.head), "place": place, "boot_id": boot_id()}
    unmeasured = {"profile_s": 0.0, "first_traced": 0, "num_traced": 0}
    spec = parent.model_copy(update=own | unmeasured)
    data = load(spec.data, spec.input_shape, spec.seed)
    device = first_device()
    model, halves = model_and_halves(spec, data, device)
    size = ceil(spec.batch_size / spec.num_parts)
    workload = describe(model, torch.zeros(size, *data.sample_shape, device=device), spec.model)
    parts = split(workload, spec.config)
    return TrainingJob(spec, model, halves, data, workload, parts, device)


def model_and_halves(
    spec: RunSpec, data: Dataset, device: torch.device
) -> tuple[nn.Module, Halves]:
    """Return a run's model and halves, or its stand-ins; InvalidInput if they cannot be built."""
    if spec.pace is not None:
        return stand_in(spec)
    torch.manual_seed(spec.seed)
    model = find(spec.model).build(spec.num_classes)
    return model, cut_with(model, data, spec.head, device)


def cut_with(model: nn.Module, data: Dataset, first: str, device: torch.device) -> Halves:
    """Move a model to the device, and cut it by some samples; InvalidInput if it cannot be cut."""
    inputs, _ = data.train.__getitems__(range(min(_NUM_EXAMPLES, len(data.train))))
    return cut(model.to(device).train(), inputs.to(device), first)


def layers_in(model: nn.Module, names: tuple[str, ...]) -> tuple[LayerModule, ...]:
    """Return the layers of the model whose parameters have these names."""
    layers = model.layers if isinstance(model, PacedWhole) else layers_of(model)
    return tuple(layer for layer in layers if layer.parameters[0][0] in names)


def device_name(kind: str, number: int) -> str:
    """Return a device's name in plans: the hub's is number 0, then those of the bodies."""
    return f"{kind}{number}"


def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device in plans."""
    return device_of(device).kind


def layout_of(spec: RunSpec, halves: Halves, data: Dataset) -> str:
    """Return the layout on which body and hub must agree to train one model, as JSON."""
    in_body = zip(halves.body_names, halves.body_parameters, strict=True)
    in_head = zip(halves.head_names, halves.head_parameters, strict=True)
    return json.dumps(
        {
            # After a restart of the machine the hub goes on with another boot_id.
            "settings": spec.model_dump(mode="json", exclude={"boot_id"}),
            "body": {name: f"{p.dtype} {list(p.shape)}" for name, p in in_body},
            "head": {name: f"{p.dtype} {list(p.shape)}" for name, p in in_head},
            "activations": list(halves.crossing),
            "samples": [len(data.train), *data.sample_shape],
        }
    )


def difference(here: str, there: str) -> str | None:
    """Return the first difference of two layouts, or None; InvalidInput if `there` is none."""
    try:
        own, other = json.loads(here), dict(json.loads(there))
    except (ValueError, TypeError):
        raise InvalidInput("what it says of its run cannot be read") from None
    for part, value in own.items():
        found = other.get(part)
        if isinstance(value, dict) and isinstance(found, dict):
            for name in value | found:
                if value.get(name) != found.get(name):
                    return f"{part}, {name}: {found.get(name)} and not {value.get(name)}"
        elif value != found:
            return f"{part}: {found} and not {value}"
    return None


def batches_of(spec: RunSpec, worker: int, num_samples: int) -> ShardedBatches:
    """Return a worker's batches of an epoch; InvalidInput if its samples cannot be shared."""
    own = spec.part(worker), spec.num_parts, spec.seed
    return ShardedBatches(num_samples, spec.batch_size, *own)


def _traced(session: TrainingSession, parts: Split, num_samples: int, **fields: Any) -> RunSpec:
    """Return a spec of this machine with the steps to trace: the last ones of the second epoch."""
    config = replace(session.config, head=parts.head.layers[0].name)
    own = {"batch_size": session.settings.batch_size, "profile_s": session.settings.profile_s}
    spec = RunSpec(boot_id=boot_id(), config=config, **own, **fields)
    steps = len(batches_of(spec, 0, num_samples))
    steady = max(0, steps - _NUM_COLD)
    # Of an only epoch at most its second half: the first steps wait for kernels and memory.
    num_traced = min(_MAX_TRACED, steady if spec.epochs > 1 else steady // 2)
    first = min(2, spec.epochs) * steps - num_traced
    return spec.model_copy(update={"first_traced": first, "num_traced": num_traced})


class SampleShare:
    """The batches of one worker, by the step: those of a data-parallel rank.

    A step of all workers has `batch_size` samples, and each worker its part. Raises InvalidInput if
    they cannot be shared so, or a sample may have several labels.
    """

    def __init__(
        self, data: Dataset, batch_size: int, worker: int, workers: int, epochs: int, seed: int
    ) -> None:
        shared = len(data.train), batch_size, worker, workers, seed

        def rows_of(epoch: int) -> list[list[int]]:
            batches = ShardedBatches(*shared)  # its own, for two threads ask about two epochs
            batches.set_epoch(epoch)
            return list(batches)

        # Of two epochs: at their border the next batch is read while the last one is trained on.
        self._rows_of = lru_cache(maxsize=2)(rows_of)
        self._sizes, self._workers = ShardedBatches(*shared).global_sizes, workers
        self._samples = data.train
        self.steps_per_epoch = len(self._sizes)  # in which some worker takes every sample once
        self.num_steps = epochs * self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        """Return True if a step is the last of its epoch."""
        return (step + 1) % self.steps_per_epoch == 0

    def weight(self, step: int) -> float:
        """Return the factor of the part's mean loss with which all samples weigh alike."""
        whole = self._sizes[step % self.steps_per_epoch]
        return len(self.rows(step)) * self._workers / whole

    def rows(self, step: int) -> list[int]:
        """Return the numbers of a step's samples."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._rows_of(epoch)[place]

    def batch(self, step: int) -> Batch:
        """Return the inputs and the class numbers of a step; InvalidInput if they are none."""
        inputs, targets = self._samples.__getitems__(self.rows(step))
        if targets.dtype == torch.bool:
            raise InvalidInput("data: samples with several labels cannot be trained on by wheel")
        return inputs, targets


class PacedWhole(nn.Module):
    """The parameters of both halves under the whole model's names; `update_s` is for `PacedSGD`."""

    def __init__(self, body: PacedModel, head: PacedModel) -> None:
        super().__init__()
        self.update_s = head.update_s
        # Of both halves: their modules are called, and not those of the whole.
        self.layers: tuple[LayerModule, ...] = (*layers_of(body), *layers_of(head))
        for name, parameter in chain(body.named_parameters(), head.named_parameters()):
            *path, own = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(own, parameter)


class _ZeroGradients(torch.autograd.Function):
    """Zeros as the gradients of the activations; those of the scores go on to the head's layers."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, activations: Tensor) -> Tensor:
        ctx.shape = activations.shape
        return scores.detach()

    @staticmethod
    def backward(ctx: Any, *of_scores: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd takes a tensor as gradient without a copy only if nobody else holds it.
        return of_scores[0], _zeros(ctx.shape).detach()


_zeros = lru_cache(maxsize=2)(torch.zeros)  # an epoch's last batch is smaller


def stand_in(spec: RunSpec) -> tuple[PacedWhole, Halves]:
    """Return the same stand-ins in every process; InvalidInput if the model cannot be paced."""
    pace = spec.pace
    assert pace is not None
    workload = workload_of(spec.model, pace.samples, pace.input_shape)
    parts = split(workload, Wheel(head=spec.head))
    return paced_halves(parts, pace.forward_s, pace.backward_s, pace.update_s, _NUM_PACED_CLASSES)


def paced_halves(
    parts: Split,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    update_s: float,
    num_classes: int = 1,
) -> tuple[PacedWhole, Halves]:
    """Return a stand-in for the whole model, whose parameters its halves share, and the halves.

    Both sequences are the seconds of the whole model's layers, in forward order: the body's and
    then the head's (`core.cost.LayerTimes` has them). The body hands on as many values of each
    sample as the real one, and the head returns as many activation gradients. Errors are those of
    `PacedModel`.
    """
    count = len(parts.body.layers)
    values = parts.head.input_nbytes // (_FLOAT32_NBYTES * parts.body.batch_size)
    body = PacedModel(parts.body, forward_s[:count], backward_s[:count], 0.0, values)
    head = PacedModel(parts.head, forward_s[count:], backward_s[count:], update_s, num_classes)
    # So that the head's backward reaches the activations.
    head.register_forward_hook(lambda _, inputs, scores: _ZeroGradients.apply(scores, inputs[0]))  # type: ignore[no-untyped-call]
    in_body, in_head = (tuple(name for name, _ in half.named_parameters()) for half in (body, head))
    return PacedWhole(body, head), Halves(body, head, in_body, in_head, (values,))
