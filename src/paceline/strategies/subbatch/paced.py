"""Split models whose layers sleep for given times instead of computing, for rehearsals.

Steps and exchanges are real. All values are zeros, except for the loss, and for gradients if a
codec sends a share of them.
"""

import time
from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.cost import LayerTimes, PacedDevice, Rate, layer_times
from paceline.core.workload import Layer, Workload
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import Cut, cut, layer_work, matrix_of, num_outputs
from paceline.strategies.subbatch.layers import DropoutMasks, HeadLayer
from paceline.strategies.subbatch.trainer import SplitModel
from paceline.training.models.chained_head import TracedLayer
from paceline.training.models.paced import PacedModel, PacedSGD
from paceline.training.models.sharded import Sharding

SubBatchTimes = Callable[[int, int], tuple[float, float, float]]


class PacedHeadLayer(HeadLayer):
    """A layer that sleeps in each sub-batch; `num_inputs` is None for a BatchNorm1d.

    `times`: from a sub-batch's number and rows to the seconds of forward, input gradients and
    weight gradients.
    """

    def __init__(
        self,
        name: str,
        num_inputs: int | None,
        sharding: Sharding,
        rank: int,
        times: SubBatchTimes,
    ) -> None:
        own = sharding.sizes[rank]
        module: nn.Linear | nn.BatchNorm1d = nn.BatchNorm1d(own, device="meta")
        if num_inputs is not None:
            module = nn.Linear(num_inputs, own, device="meta")
        super().__init__(TracedLayer(name, module), sharding, rank)
        self._times = times
        self._num_rows: dict[int, int] = {}  # by sub-batch

    def forward(self, number: int, inputs: Tensor, rows: Tensor, masks: DropoutMasks) -> Tensor:
        """Sleep, and return zeros (N, own)."""
        time.sleep(self._times(number, len(inputs))[0])
        return torch.zeros(len(inputs), self.shard.size)

    def backward_input(self, number: int, by_outputs: Tensor, scale: float) -> Tensor:
        """Sleep, and return zeros (N, inputs)."""
        count = self._num_rows[number] = len(by_outputs)
        time.sleep(self._times(number, count)[1])
        return torch.zeros(count, self.module.weight.shape[-1])

    def backward_weight(self, number: int, scale: float) -> None:
        """Sleep for the time of the weight gradients."""
        time.sleep(self._times(number, self._num_rows.pop(number))[2])


class _PacedBody(PacedModel):
    """A body with outputs (samples, rows, features), or (samples, features)."""

    def __init__(self, parts: Cut, times: LayerTimes, codec: str | None) -> None:
        start, matrix = len(parts.body.layers), matrix_of(parts.head[0])
        assert matrix is not None  # a head begins with a linear layer
        self._shape = [parts.rows_per_sample] if parts.rows_per_sample > 1 else []
        self._shape.append(matrix.shape[1])
        own_times = times.forward_s[:start], times.backward_s[:start]
        gradient_like = stand_ins_for(codec)
        super().__init__(parts.body, *own_times, 0.0, prod(self._shape), gradient_like)

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep, and return zeros; backward makes all gradients."""
        return super().forward(inputs).view(len(inputs), *self._shape)


def paced_optimizer(each_s: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a factory of optimizers that sleep for a time per value, and change nothing."""
    return lambda module: PacedSGD(
        list(module.parameters()), each_s * sum(one.numel() for one in module.parameters())
    )


def paced_model(workload: Workload, config: SubBatch, rank: int, device: PacedDevice) -> SplitModel:
    """Return a rank's part of a model that sleeps as long as a device would compute.

    `workload`: the largest rank's part of a step. InvalidInput if there is no head to split.
    """
    parts = cut(workload, config.head, config.workers)
    start, count = len(parts.body.layers), workload.batch_size * parts.rows_per_sample
    times, unscaled = device.times(workload), layer_times(workload, device.rate)
    body = _PacedBody(parts, times, config.gradients)
    head = []
    for place, layer in enumerate(parts.head, start):
        sharding, matrix = Sharding.even(num_outputs(layer), config.workers), matrix_of(layer)
        share = sharding.sizes[rank] / sharding.num_outputs
        scales = (
            _ratio(times.forward_s[place], unscaled.forward_s[place]),
            _ratio(times.backward_s[place], unscaled.backward_s[place]),
        )
        own_times = partial(_seconds, device.rate, layer, share, count, scales)
        num_inputs = None if matrix is None else matrix.shape[1]
        head.append(PacedHeadLayer(layer.name, num_inputs, sharding, rank, own_times))
    module = nn.ModuleList([body, *(layer.module for layer in head)])
    return SplitModel(module, body, tuple(head), workload.batch_size, parts.rows_per_sample)


def _ratio(one: float, other: float) -> float:
    return one / other if other else 1.0


def _seconds(
    rate: Rate,
    layer: Layer,
    share: float,
    count: int,
    scales: tuple[float, float],
    number: int,
    num_rows: int,
) -> tuple[float, float, float]:
    """Return the seconds of a sub-batch of `num_rows`, from a layer's work for `count` rows."""
    work = layer_work(layer, share, num_rows / count, accumulates=number > 0)
    forward_s, input_s, weight_s = (
        0.0 if cost is None else rate.work_s(cost) + rate.latency_s(cost) for cost in work
    )
    return scales[0] * forward_s, scales[1] * input_s, scales[1] * weight_s
