"""The work of a head's layer for one sub-batch: the same for the plan and for paced layers."""

from typing import NamedTuple, Self

from paceline.core.cost import update_cost
from paceline.core.workload import Cost, Layer, Workload
from paceline.strategies.subbatch.head import matrix_of


class LayerWork(NamedTuple):
    """The work of some outputs of a layer; without `backward_weight`, all of it is in the input's.

    A linear layer has one product for the gradients by its input, and one for those by its weights.
    """

    forward: Cost
    backward_input: Cost
    backward_weight: Cost | None

    def with_update(self, update: Cost) -> Self:
        """Return the same work, with the update of the weights by their gradients at its end."""
        if self.backward_weight is None:
            return self._replace(backward_input=self.backward_input + update)
        return self._replace(backward_weight=self.backward_weight + update)


def layer_work(layer: Layer, share: float, part: float, accumulates: bool) -> LayerWork:
    """Return the work of a `share` of the outputs for `part` of the samples that `layer` is of.

    However few samples there are, weights are read whole, and their gradients written: once in each
    product. What `accumulates` reads the gradients before, and adds them up.
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
    """Return the update of a share of a layer's outputs."""
    whole = update_cost(Workload(layer.name, 1, (layer,), (0,), 0))
    return Cost(whole.flops * share, whole.nbytes * share, whole.num_calls)


def _of(cost: Cost, share: float, part: float, weights: float) -> Cost:
    """Return the cost for some samples, of which `weights` bytes are the same for any number."""
    fixed = min(weights, cost.nbytes * share)
    nbytes = fixed + (cost.nbytes * share - fixed) * part
    return Cost(cost.flops * share * part, nbytes, cost.num_calls)
