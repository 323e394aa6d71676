"""Stand-ins for models whose head is split: layers that take a given time and compute nothing.

The body is `models.paced`; what follows it is the strategy's own step, with every real exchange.
All values are zeros, but those of the loss.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.pace import LayerTimes
from paceline.core.workload import Layer, Workload
from paceline.models.paced import PacedSGD, paced
from paceline.strategies.subbatch.chain import Link
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import cut, matrix_of, num_outputs, shares
from paceline.strategies.subbatch.learner import Parallel
from paceline.strategies.subbatch.split import Rows, Stage, Widths
from paceline.training.step import SGD


class StageTimes(NamedTuple):
    """Seconds of a sample in a layer of the head, for this rank's outputs."""

    forward_s: float
    errors_s: float
    weights_s: float


class PacedStage(Stage):
    """A layer that takes its time for every sample; `inputs` of a linear one, None of another."""

    def __init__(
        self, name: str, inputs: int | None, widths: Widths, rank: int, times: StageTimes
    ) -> None:
        own = widths.columns(rank).width
        module: nn.Linear | nn.BatchNorm1d = (
            nn.BatchNorm1d(own, device="meta")
            if inputs is None
            else nn.Linear(inputs, own, device="meta")
        )
        super().__init__(Link(name, module, ()), widths, rank)
        self._inputs, self._times = inputs, times
        self._num_rows: dict[int, int] = {}  # by pass

    def forward(self, number: int, inputs: Tensor, rows: Rows) -> Tensor:
        """Return zeros (N, own) after the time of N samples."""
        _spend(self._times.forward_s * len(inputs))
        return torch.zeros(len(inputs), self.columns.width)

    def errors(self, number: int, of_outputs: Tensor, scale: float) -> Tensor:
        """Return zeros for all inputs after the time of their errors."""
        count = self._num_rows[number] = len(of_outputs)
        _spend(self._times.errors_s * count)
        return torch.zeros(count, self._inputs or self.columns.width)

    def weights(self, number: int, scale: float) -> None:
        """Take the time of the weights' gradients."""
        _spend(self._times.weights_s * self._num_rows.pop(number))


@dataclass(frozen=True)
class PacedUpdates(SGD):
    """Optimizers that take so many seconds for each value, and change nothing."""

    each_s: float = 0.0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the model's."""
        parameters = list(model.parameters())
        return PacedSGD(parameters, self.each_s * sum(one.numel() for one in parameters))


def paced_parallel(workload: Workload, config: SubBatch, rank: int, times: LayerTimes) -> Parallel:
    """Return what stands in for a rank's part of a model.

    `times` are those of a rank's part of a step, and of whole layers. Of a linear layer's backward
    half are errors and half are weights, as in the plan. InvalidInput if there is no head to split.
    """
    parts = cut(workload, config.head, config.workers)
    start = len(parts.body.layers)
    body = paced(
        parts.body,
        times.forward_s[:start],
        times.backward_s[:start],
        0.0,
        num_inputs(parts.head[0]),
    )
    count = workload.batch_size
    stages = tuple(
        _stage(layer, forward_s / count, backward_s / count, config, rank)
        for layer, forward_s, backward_s in zip(
            parts.head, times.forward_s[start:], times.backward_s[start:], strict=True
        )
    )
    return Parallel(
        model=nn.ModuleList([body, *(stage.module for stage in stages)]),
        body=body,
        stages=stages,
        batch_size=workload.batch_size,
        num_passes=len(shares(workload.batch_size, config.workers)),
    )


def num_inputs(layer: Layer) -> int:
    """Return how many values of a sample a layer works on."""
    matrix = matrix_of(layer)
    return num_outputs(layer) if matrix is None else matrix.shape[1]


def _stage(
    layer: Layer, forward_s: float, backward_s: float, config: SubBatch, rank: int
) -> PacedStage:
    widths = Widths.of(num_outputs(layer), config.workers)
    part = widths.parts[rank] / widths.whole
    if matrix_of(layer) is None:
        times = StageTimes(part * forward_s, part * backward_s, 0.0)
        return PacedStage(layer.name, None, widths, rank, times)
    half_s = part * backward_s / 2
    times = StageTimes(part * forward_s, half_s, half_s)
    return PacedStage(layer.name, num_inputs(layer), widths, rank, times)


def _spend(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(left)
