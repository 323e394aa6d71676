"""Make models for rehearsals: their layers sleep instead of computing; exchanges are real."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.cost import PacedDevice, layer_times
from paceline.core.workload import Layer, Workload
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import (
    cut,
    layer_work,
    matrix_of,
    num_outputs,
    rows_per_sample,
)
from paceline.strategies.subbatch.layers import DropoutMasks, HeadLayer
from paceline.strategies.subbatch.trainer import SplitModel
from paceline.training.models.chained_head import TracedLayer
from paceline.training.models.paced import PacedModel, PacedSGD
from paceline.training.models.sharded import Sharding

SubBatchTimes = Callable[[int, int], tuple[float, float, float]]


class PacedHeadLayer(HeadLayer):
    """A layer of the head that sleeps for given times instead of computing.

    `num_inputs`: inputs of a linear layer; None for a BatchNorm1d. `times(number, num_rows)`:
    returns the seconds of the forward pass, of input gradients and of weight gradients in sub-batch
    `number`.
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
        self._num_rows: dict[int, int] = {}  # number of rows, by number of the sub-batch

    def forward(self, number: int, inputs: Tensor, rows: Tensor, masks: DropoutMasks) -> Tensor:
        """Sleep as long as the forward pass would take, and return zeros instead of outputs."""
        time.sleep(self._times(number, len(inputs))[0])
        return torch.zeros(len(inputs), self.shard.size)

    def backward_input(self, number: int, by_outputs: Tensor, scale: float) -> Tensor:
        """Sleep as long as computing the input gradients would take, and return zeros instead."""
        count = self._num_rows[number] = len(by_outputs)
        time.sleep(self._times(number, count)[1])
        return torch.zeros(count, self.module.weight.shape[-1])

    def backward_weight(self, number: int, scale: float) -> None:
        """Sleep as long as computing the weight gradients would take."""
        time.sleep(self._times(number, self._num_rows.pop(number))[2])


def paced_optimizer(each_s: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a factory of optimizers whose step sleeps `each_s` seconds per parameter value."""
    return lambda module: PacedSGD(
        list(module.parameters()), each_s * sum(one.numel() for one in module.parameters())
    )


def paced_model(workload: Workload, config: SubBatch, rank: int, device: PacedDevice) -> SplitModel:
    """Return a rank's part of a model whose layers sleep as long as `device` would compute.

    `workload`: the model's layers, with costs for the rank with the most samples. Raises
    InvalidInput if the model cannot be split.
    """
    parts = cut(workload, config.head, config.workers)
    start, num_rows = len(parts.body.layers), rows_per_sample(parts)
    count = workload.batch_size * num_rows
    times, usual = device.times(workload), layer_times(workload, device.rate)
    scales = _ratio(times.forward_s, usual.forward_s), _ratio(times.backward_s, usual.backward_s)
    matrix = matrix_of(parts.head.layers[0])
    assert matrix is not None  # a head begins with a linear layer
    rows = () if num_rows == 1 else (num_rows,)
    body = PacedModel(
        parts.body,
        times.forward_s[:start],
        times.backward_s[:start],
        (*rows, matrix.shape[1]),
        stand_ins_for(config.gradients),
    )

    def paced(layer: Layer) -> PacedHeadLayer:
        sharding, matrix = Sharding.even(num_outputs(layer), config.workers), matrix_of(layer)
        share = sharding.sizes[rank] / sharding.num_outputs

        def seconds(number: int, num_rows: int) -> tuple[float, float, float]:
            work = layer_work(layer, share, num_rows / count, accumulates=number > 0)
            own = (0.0 if cost is None else device.rate.seconds(cost) for cost in work)
            forward_s, input_s, weight_s = own
            return scales[0] * forward_s, scales[1] * input_s, scales[1] * weight_s

        num_inputs = None if matrix is None else matrix.shape[1]
        return PacedHeadLayer(layer.name, num_inputs, sharding, rank, seconds)

    head = tuple(map(paced, parts.head.layers))
    module = nn.ModuleList([body, *(layer.module for layer in head)])
    return SplitModel(module, body, head, workload.batch_size, num_rows)


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(one) / sum(other) if any(other) else 1.0
