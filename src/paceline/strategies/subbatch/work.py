"""Compute the work of a head's layer for a sub-batch, for plans and paced layers."""

from typing import NamedTuple, Self

from paceline.core.cost import update_cost
from paceline.core.workload import Cost, Layer, Workload
from paceline.strategies.subbatch.head import matrix_of


class LayerWork(NamedTuple):
    """The work of some outputs of a layer.

    A linear layer computes input and weight gradients separately; for others `backward_weight` is
    None.
    """

    forward: Cost
    backward_input: Cost
    backward_weight: Cost | None

    def with_update(self, update: Cost) -> Self:
        """Add the weight update at the end."""
        if self.backward_weight is None:
            return self._replace(backward_input=self.backward_input + update)
        return self._replace(backward_weight=self.backward_weight + update)


def layer_work(layer: Layer, share: float, part: float, accumulates: bool) -> LayerWork:
    """Return the work of a `share` of a layer's outputs for `part` of its samples.

    Each product reads all weights or writes all their gradients, even for few samples.
    `accumulates`: gradients are read and added.
    """
    weights = layer.gradient_nbytes * share
    forward = _of(layer.forward, share, part, weights)
    if matrix_of(layer) is None:
        return LayerWork(forward, _of(layer.backward, share, part, 2 * weights), None)
    num_calls = layer.backward.num_calls
    half = _of(layer.backward, share, part, 2 * weights)
    flops, nbytes = half.flops / 2, half.nbytes / 2
    added = 2 * weights if accumulates and layer.backward.nbytes else 0.0
    return LayerWork(
        forward,
        Cost(flops, nbytes, num_calls - num_calls // 2),
        Cost(flops, nbytes + added, num_calls // 2),
    )


def update_work(layer: Layer, share: float) -> Cost:
    """Return the cost of updating a share of a layer's outputs."""
    whole = update_cost(Workload(layer.name, 1, (layer,), (0,), 0))
    return Cost(whole.flops * share, whole.nbytes * share, whole.num_calls)


def _of(cost: Cost, share: float, part: float, weights: float) -> Cost:
    """Return the cost for `part` of the samples; `weights` bytes do not depend on it."""
    fixed = min(weights, cost.nbytes * share)
    nbytes = fixed + (cost.nbytes * share - fixed) * part
    return Cost(cost.flops * share * part, nbytes, cost.num_calls)
