"""Split models that stand in for a device: layers take a given time and compute nothing.

The body is `models.paced`; the head's layers are here. Step and exchanges are the strategy's own.
All values are zeros, but those of the loss, and of gradients by a codec that sends a share of them.
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
from paceline.strategies.subbatch.head import Cut, cut, matrix_of, num_outputs
from paceline.strategies.subbatch.layers import DropoutMasks, HeadLayer
from paceline.strategies.subbatch.trainer import SplitModel
from paceline.strategies.subbatch.work import layer_work
from paceline.training.models.chained_head import TracedLayer
from paceline.training.models.paced import PacedModel, PacedSGD
from paceline.training.models.sharded import Sharding

SubBatchTimes = Callable[[int, int], tuple[float, float, float]]


class PacedHeadLayer(HeadLayer):
    """A layer that takes its time for each sub-batch; `num_inputs` is None of a BatchNorm1d.

    `times` of a sub-batch, by its number and its rows: seconds in forward, and in backward for its
    inputs and for the weights.
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
        """Return zeros (N, own) after the time of N rows."""
        time.sleep(self._times(number, len(inputs))[0])
        return torch.zeros(len(inputs), self.shard.size)

    def backward_input(self, number: int, by_outputs: Tensor, scale: float) -> Tensor:
        """Return zeros for all inputs after the time of their gradients."""
        count = self._num_rows[number] = len(by_outputs)
        time.sleep(self._times(number, count)[1])
        return torch.zeros(count, self.module.weight.shape[-1])

    def backward_weight(self, number: int, scale: float) -> None:
        """Take the time of the weights' gradients."""
        time.sleep(self._times(number, self._num_rows.pop(number))[2])


class _PacedBody(PacedModel):
    """A body that hands on (samples, rows, features), or (samples, features) of one row each."""

    def __init__(self, parts: Cut, times: LayerTimes, codec: str | None) -> None:
        start, matrix = len(parts.body.layers), matrix_of(parts.head[0])
        assert matrix is not None  # a head begins with a linear layer
        self._shape = [parts.rows_per_sample] if parts.rows_per_sample > 1 else []
        self._shape.append(matrix.shape[1])
        own_times = times.forward_s[:start], times.backward_s[:start]
        gradient_like = stand_ins_for(codec)
        super().__init__(parts.body, *own_times, 0.0, prod(self._shape), gradient_like)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return zeros after the time of the layers; backward makes all gradients."""
        return super().forward(inputs).view(len(inputs), *self._shape)


def paced_optimizer(each_s: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a factory of optimizers that take so long for each value, and change nothing."""

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        parameters = list(module.parameters())
        return PacedSGD(parameters, each_s * sum(one.numel() for one in parameters))

    return optimizer


def paced_model(workload: Workload, config: SubBatch, rank: int, device: PacedDevice) -> SplitModel:
    """Return the stand-in for a rank's part of a model, as fast as this device.

    `workload` is the largest part of a step that a rank has. A sub-batch of the head has the work
    that the plan gives it. Raises InvalidInput if there is no head to split.
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
    """Return the seconds of a sub-batch of so many rows; the layer is of `count`."""
    work = layer_work(layer, share, num_rows / count, accumulates=number > 0)
    forward_s, input_s, weight_s = (
        0.0 if cost is None else rate.work_s(cost) + rate.latency_s(cost) for cost in work
    )
    return scales[0] * forward_s, scales[1] * input_s, scales[1] * weight_s
