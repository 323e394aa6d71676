"""The plan of strategy wheel: body workers alternate on devices, heads answer at the hub.

    body 0 compute  fwd 0 | fwd 1 | bwd 0  fwd 0 | bwd 1  fwd 1 | bwd 0  ...
    to the hub            [act 0]  [act 1]  [grad 0][act 0]  [grad 1][act 1]
    hub compute                  head 0  head 1  step 0  head 0   step 1  head 1
    to the body                    [res 0][par 0]    [res 1][par 1]

A turn is a worker's backward and its next forward (figure 3 of Du et al. 2017); the workers of a
device take turns in a fixed order, so that compute never overlaps on it, and what one of them waits
for hides behind the others. The parameters of the next forward are fetched as soon as the residuals
are there: they miss the worker's own last gradient, and have all those before it. A device with one
lane fetches them after that update instead: alone, it trains as if nobody had cut the model.

The server updates all parameters when both halves' gradients of a step are there (section 3.3). It
shares the hub's device with the head workers, which read the head's parameters where they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from paceline.core.cost import compute_lane
from paceline.core.machine import Device, Machine
from paceline.core.memory import feature_nbytes
from paceline.core.pace import update_cost
from paceline.core.plan import Cost, Kind, Plan, Task, task_name
from paceline.core.strategy import Window
from paceline.core.workload import Layer, Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.placement import Placement, place
from paceline.strategies.wheel.split import Purpose, Split, messages, split
from paceline.strategies.wheel.ways import Ways

_KEPT_BY_SERVER = 2  # the parameters and their momentum


def plan(workload: Workload, machine: Machine, config: Wheel, window: Window) -> Plan:
    """Return the tasks of `window` steps, in each of which every worker trains on one batch.

    InvalidInput if the model has no head worth splitting off, the machine has too few devices or
    they are not linked, or it is not known how fast they are with a codec.
    """
    placement = place(machine, config)
    parts = split(workload, config)
    sent = messages(parts, config)
    ways = tuple(Ways.between(machine, placement, worker, sent) for worker in range(config.workers))
    work = _Steps(workload, parts, placement, ways, config.lanes > 1)
    return Plan(work.tasks(window.num_steps))


def memory(workload: Workload, machine: Machine, config: Wheel) -> Mapping[str, int]:
    """Return the bytes that each device needs, by name.

    The hub keeps parameters and momentum, and for each worker a step that waits for its second
    half; a body worker keeps its body's parameters, and those of its next step, and gradients.
    """
    placement, parts = place(machine, config), split(workload, config)
    crossing, body = parts.crossing_nbytes, parts.body.gradient_nbytes
    waiting = config.workers * (workload.gradient_nbytes + crossing)
    kept = _KEPT_BY_SERVER * workload.gradient_nbytes
    hub = kept + waiting + feature_nbytes(parts.head.layers)
    num_copies = 3 if config.lanes > 1 else 2
    lane = num_copies * body + feature_nbytes(parts.body.layers) + parts.body.input_nbytes
    lanes = {device.name: lane * len(workers) for device, workers in placement.lanes.items()}
    return {placement.hub.name: hub} | lanes


@dataclass(frozen=True)
class _Steps:
    """What every step of the window does; `prefetches` is whether parameters come beforehand."""

    workload: Workload
    parts: Split
    placement: Placement
    ways: tuple[Ways, ...]
    prefetches: bool

    def tasks(self, num_steps: int) -> Iterator[Task]:
        """Yield all steps: turns of backward and the next forward, and the hub's between them."""
        lanes = self.placement.lanes
        before: dict[Device, tuple[str, ...]] = dict.fromkeys(lanes, ())
        for device, workers in lanes.items():
            for worker in workers:
                yield from self._fetch(0, worker)
                yield from self._forward(0, worker, before[device])
                before[device] = (self._end(0, Kind.FORWARD, worker),)
        for step in range(num_steps):
            for worker in range(len(self.ways)):
                yield from self._answer(step, worker)
            is_last = step + 1 == num_steps
            for device, workers in lanes.items():
                for worker in workers:
                    yield from self._turn(step, worker, before[device], is_last)
                    kind = Kind.BACKWARD if is_last else Kind.FORWARD
                    before[device] = (self._end(step + (not is_last), kind, worker),)

    def _fetch(self, step: int, worker: int) -> Iterator[Task]:
        """Yield the way of the body's parameters."""
        after: tuple[str, ...] = ()
        if step and self.prefetches:
            after = (self.ways[worker].reception(step - 1, Purpose.RESIDUALS),)
            if step > 1:
                after += (task_name(step - 2, Kind.STEP, worker=worker),)
        elif step:
            after = (task_name(step - 1, Kind.STEP, worker=worker),)
        yield from self.ways[worker].tasks(step, Purpose.BODY_PARAMETERS, after)

    def _forward(self, step: int, worker: int, before: tuple[str, ...]) -> Iterator[Task]:
        """Yield the loading of the batch and the body's forward, which needs the parameters."""
        device = self.placement.bodies[worker]
        on = (compute_lane(device.name),)
        load = task_name(step, Kind.LOAD, worker=worker)
        yield Task(load, Kind.LOAD, on, self._load, before)
        after = (load, self.ways[worker].arrival(step, Purpose.BODY_PARAMETERS))
        yield from self._layers(step, Kind.FORWARD, self.parts.body, worker, device, after)

    def _answer(self, step: int, worker: int) -> Iterator[Task]:
        """Yield labels and activations going to the hub, the head's work, and the residuals."""
        ways, hub, head = self.ways[worker], self.placement.hub, self.parts.head
        loaded = task_name(step, Kind.LOAD, worker=worker)
        yield from ways.tasks(step, Purpose.LABELS, (loaded,))
        done = self._end(step, Kind.FORWARD, worker)
        yield from ways.tasks(step, Purpose.ACTIVATIONS, (done,))
        after = tuple(ways.arrival(step, p) for p in (Purpose.LABELS, Purpose.ACTIVATIONS))
        yield from self._layers(step, Kind.FORWARD, head, worker, hub, after)
        after = (task_name(step, Kind.FORWARD, head.layers[-1].name, worker),)
        yield from self._layers(step, Kind.BACKWARD, head, worker, hub, after)
        yield from ways.tasks(step, Purpose.RESIDUALS, (self._head_end(step, worker),))

    def _turn(
        self, step: int, worker: int, before: tuple[str, ...], is_last: bool
    ) -> Iterator[Task]:
        """Yield the body's backward, the update that it completes, and the next forward."""
        ways, device, hub = self.ways[worker], self.placement.bodies[worker], self.placement.hub
        after = (*before, ways.arrival(step, Purpose.RESIDUALS))
        yield from self._layers(step, Kind.BACKWARD, self.parts.body, worker, device, after)
        done = (self._end(step, Kind.BACKWARD, worker),)
        yield from ways.tasks(step, Purpose.BODY_GRADIENTS, done)
        halves = (ways.arrival(step, Purpose.BODY_GRADIENTS), self._head_end(step, worker))
        name = task_name(step, Kind.STEP, worker=worker)
        yield Task(name, Kind.STEP, (compute_lane(hub.name),), self._update, halves)
        if not is_last:
            yield from self._fetch(step + 1, worker)
            yield from self._forward(step + 1, worker, done)

    def _layers(
        self,
        step: int,
        kind: Kind,
        part: Workload,
        worker: int,
        device: Device,
        after: tuple[str, ...],
    ) -> Iterator[Task]:
        """Yield the layers of a half, one after another; a GPU then tells its host that it is done.

        Not after a head's forward, which its backward follows at once.
        """
        on = (compute_lane(device.name),)
        layers = part.layers if kind is Kind.FORWARD else part.in_backward_order
        hands_over = kind is Kind.BACKWARD or part is self.parts.body
        for layer in layers:
            cost = _cost(layer, kind)
            if layer is layers[-1] and hands_over and device.kind == "gpu":
                cost = self._synced[layer.name, kind]
            name = task_name(step, kind, layer.name, worker)
            yield Task(name, kind, on, cost, after, layer.name)
            after = (name,)

    @cached_property
    def _synced(self) -> dict[tuple[str, Kind], Cost]:
        """The costs of all layers with a synchronisation; plans price a cost by its identity."""
        return {
            (layer.name, kind): _cost(layer, kind) + Cost(num_syncs=1)
            for layer in self.workload.layers
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        }

    @cached_property
    def _load(self) -> Cost:
        """The batch is read and written once."""
        return Cost(nbytes=2 * self.workload.input_nbytes, num_calls=1)

    @cached_property
    def _update(self) -> Cost:
        """Body and head are updated together."""
        return update_cost(self.workload)

    def _end(self, step: int, kind: Kind, worker: int) -> str:
        """Return the name of the task with which a body's forward or backward ends."""
        body = self.parts.body
        layers = body.layers if kind is Kind.FORWARD else body.in_backward_order
        return task_name(step, kind, layers[-1].name, worker)

    def _head_end(self, step: int, worker: int) -> str:
        """Return the name of the task with which a head's backward ends."""
        return task_name(step, Kind.BACKWARD, self.parts.head.in_backward_order[-1].name, worker)


def _cost(layer: Layer, kind: Kind) -> Cost:
    return layer.forward if kind is Kind.FORWARD else layer.backward
