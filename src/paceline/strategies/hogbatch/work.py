"""What a batch of any size costs a worker: the stages of its work, from the model to the update.

A workload says what a batch of its own size costs. From that follows another size. Arithmetic and
the traffic of activations are in proportion to the samples. The traffic of the parameters is not:
forward reads them, backward reads them and writes their gradients, whatever the batch (the layer
with which backward ends only writes: the samples need no gradient); each thread of a CPU worker
does so for its own part of the batch, and updates the model by itself. Nor are calls: every
operation is launched once. Small batches are less efficient for both reasons.
What a layer's traffic is beyond its parameters is taken to be activations; a layer that reads only
some of its parameters (an embedding) is priced as if it read all that its traffic allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.cost import compute_lane, d2h_lane, exchange_lane, h2d_lane, reduce_lane
from paceline.core.machine import Device, Machine
from paceline.core.plan import Cost, Kind, Resource
from paceline.core.transfer import lanes_of
from paceline.core.workload import Workload

MODEL = "model"  # the part of a copy of the model to a GPU
_UPDATE_TRAFFIC = 3  # of each parameter: it and its gradient are read, and it is written


class Stage(NamedTuple):
    """One task of every batch of a size: `label` is in its name, `part` what it is priced by."""

    kind: Kind
    label: str
    part: str
    on: tuple[Resource, ...]
    cost: Cost


@dataclass(frozen=True)
class Work:
    """What a worker does with a batch. `shared` says whether others train on the model, too."""

    workload: Workload
    machine: Machine
    device: Device
    threads: int
    shared: bool

    def stages(self, size: int) -> tuple[Stage, ...]:
        """Return the stages of a batch, each of which waits for the one before.

        InvalidInput if no link leads to a GPU.
        """
        if self.device.kind == "cpu":
            return (*self._passes(size), self._step(size))
        nbytes = self.workload.input_nbytes * size / self.workload.batch_size
        alone = (
            self._h2d("batch", _part("batch", size), nbytes),
            *self._passes(size),
            self._step(size),
        )
        if not self.shared:
            return alone
        model = self._h2d(MODEL, MODEL, self.workload.gradient_nbytes)
        return (alone[0], model, *alone[1:], self._d2h(), self._reduce())

    def _passes(self, size: int) -> Iterator[Stage]:
        on = (compute_lane(self.device.name),)
        for layer in self.workload.layers:
            cost = self._scaled(layer.forward, layer.gradient_nbytes, size)
            yield Stage(Kind.FORWARD, layer.name, _part(layer.name, size), on, cost)
        last = self.workload.in_backward_order[-1]
        for layer in self.workload.in_backward_order:
            times = 1 if layer is last else 2
            cost = self._scaled(layer.backward, times * layer.gradient_nbytes, size)
            yield Stage(Kind.BACKWARD, layer.name, _part(layer.name, size), on, cost)

    def _scaled(self, cost: Cost, parameter_traffic: int, size: int) -> Cost:
        share = size / self.workload.batch_size
        fixed = min(cost.nbytes, parameter_traffic)
        return Cost(
            cost.flops * share,
            fixed * self._num_parts(size) + (cost.nbytes - fixed) * share,
            cost.num_calls,
            cost.num_syncs,
        )

    def _num_parts(self, size: int) -> int:
        return min(self.threads, size)

    def _step(self, size: int) -> Stage:
        """Return the update w - eta g, by each thread that has a gradient."""
        parts, work = self._num_parts(size), self.workload
        num_tensors = sum(len(layer.parameters) for layer in work.layers)
        traffic = _UPDATE_TRAFFIC * work.gradient_nbytes
        cost = Cost(2 * work.num_parameters * parts, traffic * parts, num_tensors)
        return Stage(Kind.STEP, "", str(size), (compute_lane(self.device.name),), cost)

    def _h2d(self, what: str, part: str, nbytes: float) -> Stage:
        way = self.machine.route(self.machine.host_of(self.device), self.device)
        on = (h2d_lane(self.device.name), *lanes_of(way))
        return Stage(Kind.H2D, what, part, on, Cost(nbytes=nbytes, num_calls=1))

    def _d2h(self) -> Stage:
        way = self.machine.route(self.device, self.machine.host_of(self.device))
        on = (d2h_lane(self.device.name), *lanes_of(way))
        cost = Cost(nbytes=self.workload.gradient_nbytes, num_calls=1)
        return Stage(Kind.D2H, "update", "update", on, cost)

    def _reduce(self) -> Stage:
        """Return how the host adds what changed in the replica to the model as it is by then."""
        host = self.machine.host_of(self.device)
        on = (exchange_lane(self.device.name), reduce_lane(host.name))
        cost = Cost(nbytes=_UPDATE_TRAFFIC * self.workload.gradient_nbytes, num_calls=1)
        return Stage(Kind.REDUCE, "update", "update", on, cost)


def _part(name: str, size: int) -> str:
    """Return what a stage is priced by: a measured time holds for one size."""
    return f"{name}:{size}"
