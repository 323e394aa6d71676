"""The plan of strategy wheel: body workers alternate on devices, heads answer at the hub.

    body 0 compute  fwd 0 | fwd 1 | bwd 0  fwd 0 | bwd 1  fwd 1 | bwd 0  ...
    to the hub            [act 0]  [act 1]  [grad 0][act 0]  [grad 1][act 1]
    hub compute                  head 0  head 1  step 0  head 0   step 1  head 1
    to the body                    [res 0][par 0]    [res 1][par 1]

A turn is a worker's backward and its next forward (figure 3 of Du et al. 2017); the workers of a
device take turns in a fixed order, so that compute never overlaps on it, and what one of them waits
for hides behind the others. The parameters of the next forward are fetched as soon as the
activation gradients are there: they miss the worker's own last gradient, and have all those before
it. A device with one lane fetches them after that update instead: alone, it trains as if nobody had
cut the model.

The server updates all parameters when both halves' gradients of a step are there (section 3.3). It
shares the hub's device with the head workers, which read the head's parameters where they are.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import NamedTuple

from paceline.core import cost as costs
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, DeviceKind, Machine, codec_speed
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.strategy import Window
from paceline.core.transfer import lanes_of
from paceline.core.wire_format import Purpose, pieces
from paceline.core.workload import Layer, Workload, feature_nbytes
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, MessageSize, messages, split

_TaskIds = tuple[TaskId, ...]
_KEPT_BY_SERVER = 2  # the parameters and their momentum


def plan(workload: Workload, machine: Machine, config: Wheel, window: Window) -> Plan:
    """Return the tasks of `window` steps, in each of which every worker trains on one batch.

    InvalidInput if the model has no head worth splitting off, the machine has too few devices or
    they are not linked, or it is not known how fast they are with a codec.
    """
    return Plan(_WindowTasks(workload, machine, config).tasks(window.num_steps))


def memory(workload: Workload, machine: Machine, config: Wheel) -> Mapping[str, int]:
    """Return the bytes that each device needs, by name.

    The hub keeps parameters and momentum, and for each worker a step that waits for its second
    half; a body worker keeps its body's parameters, and those of its next step, and gradients.
    """
    placement, parts = place(machine, config), split(workload, config)
    crossing, body = parts.head.input_nbytes, parts.body.gradient_nbytes
    waiting = config.workers * (workload.gradient_nbytes + crossing)
    kept = _KEPT_BY_SERVER * workload.gradient_nbytes
    hub = kept + waiting + feature_nbytes(parts.head.layers)
    num_copies = 3 if config.lanes > 1 else 2
    lane = num_copies * body + feature_nbytes(parts.body.layers) + parts.body.input_nbytes
    lanes = {device.name: lane * len(workers) for device, workers in placement.lanes.items()}
    return {placement.hub.name: hub} | lanes


def head_devices_needed(head_s: float, num_body_devices: int, step_s: float) -> int:
    """Return the number of devices that keep the head workers from delaying a body (3.4.1).

    One answer takes `head_s` (p), and each of k body devices, which needs `step_s` (t) for a step,
    asks once in that time: p k / t. ValueError if a time is not positive.
    """
    if head_s <= 0 or step_s <= 0:
        raise ValueError(f"an answer of {head_s} s and a step of {step_s} s must be positive")
    return ceil(head_s * num_body_devices / step_s)


class DevicePlacement(NamedTuple):
    """The hub's device, and the device of each body worker.

    `lanes` are the workers that alternate on each device, in the order of their turns.
    """

    hub: Device
    bodies: tuple[Device, ...]
    lanes: dict[Device, range]


def place(machine: Machine, config: Wheel) -> DevicePlacement:
    """Return the placement; InvalidInput if there is no such host, or too few devices."""
    wanted = machine.devices[0].host if config.hub is None else config.hub
    with_devices = {device.host for device in machine.devices}
    if wanted not in with_devices:
        raise InvalidInput(
            f"hub: {wanted!r} is no host of machine {machine.name!r} that has a device; "
            f"choose one of {', '.join(sorted(with_devices))}"
        )
    hub = next(device for device in machine.devices if device.host == wanted)
    others = [device for device in machine.devices if device != hub]
    num_devices = len(config.workers_by_device)
    if num_devices > len(others):
        raise InvalidInput(
            f"workers: {config.workers} in lanes of {config.lanes} need {num_devices} devices "
            f"beside the hub's {hub.name}, but machine {machine.name!r} has {len(others)}; "
            f"at most {config.lanes * len(others)} workers fit"
        )
    lanes = dict(zip(others, config.workers_by_device.values(), strict=False))
    bodies = tuple(device for device, workers in lanes.items() for _ in workers)
    return DevicePlacement(hub, bodies, lanes)


class RouteStage(NamedTuple):
    """A part of a message's route."""

    kind: Kind
    on: tuple[Resource, ...]
    cost: Cost


def _routes(
    machine: Machine, placement: DevicePlacement, worker: int, sent: dict[Purpose, MessageSize]
) -> dict[Purpose, tuple[RouteStage, ...]]:
    """Return the stages of each message of a step, for one body worker.

        gpu  --d2h-->  host  --send-->  hub's host  --h2d-->  hub's gpu

    Encoded values are encoded before, and decoded after, by the devices that compute with them.
    """
    body, hub = placement.bodies[worker], placement.hub
    routes = {}
    for purpose in (*TO_HUB, *FROM_HUB):
        source, target = (body, hub) if purpose in TO_HUB else (hub, body)
        lane = Resource(body.name, Lane.UPLOAD if purpose in TO_HUB else Lane.DOWNLOAD)
        whole = _stages(machine, source, target, lane, sent[purpose])
        # Labels do not come from the GPU: the host has loaded them.
        known = purpose is Purpose.LABELS and whole[0].kind is Kind.D2H and len(whole) > 1
        routes[purpose] = whole[1:] if known else whole
    return routes


def _stages(
    machine: Machine, source: Device, target: Device, lane: Resource, message: MessageSize
) -> tuple[RouteStage, ...]:
    cost = Cost(nbytes=message.nbytes, num_calls=1)
    one, other = machine.host_of(source), machine.host_of(target)
    stages = []
    if source.kind == DeviceKind.GPU:
        lanes = lanes_of(machine.route(source, one))
        stages.append(RouteStage(Kind.D2H, (Resource(source.name, Lane.D2H), *lanes), cost))
    # GPUs of one host meet in its memory, unless it is known how its processes exchange messages.
    in_memory = one == other and DeviceKind.GPU in (source.kind, target.kind)
    if not in_memory or one.name in machine.network.within:
        ends = (
            source if source.kind == DeviceKind.CPU else one,
            target if target.kind == DeviceKind.CPU else other,
        )
        route = machine.route(*ends)
        lanes = lanes_of(route)
        if any(hop.link.uses_cores for hop in route):
            cores = [device for device in (source, target) if device.kind == DeviceKind.CPU]
            lanes += tuple(costs.compute_lane(device.name) for device in cores)
        stages.append(RouteStage(Kind.SEND, (*lanes, lane), cost))
    if target.kind == DeviceKind.GPU:
        lanes = lanes_of(machine.route(other, target))
        stages.append(RouteStage(Kind.H2D, (Resource(target.name, Lane.H2D), *lanes), cost))
    codec = message.wire_format
    if codec is None:
        return tuple(stages)
    coding = Cost(flops=message.num_values, num_calls=len(pieces(message.num_values)))
    encode, decode = (
        # Nothing where the times of a device's links contain its coding.
        ()
        if codec_speed(device, codec).is_within_links
        else (RouteStage(kind, costs.codec_lanes(device, codec.kernel, kind), coding),)
        for device, kind in ((source, Kind.ENCODE), (target, Kind.DECODE))
    )
    return (*encode, *stages, *decode)


class _WindowTasks:
    """The tasks of a window; `prefetches` is True if parameters are fetched beforehand."""

    def __init__(self, workload: Workload, machine: Machine, config: Wheel) -> None:
        self.placement, self.parts = place(machine, config), split(workload, config)
        sent, workers = messages(self.parts, config), range(config.workers)
        self.routes = [_routes(machine, self.placement, worker, sent) for worker in workers]
        self.prefetches = config.lanes > 1
        # One object for each cost, because plans price a cost by its identity.
        self._load = Cost(nbytes=2 * workload.input_nbytes, num_calls=1)  # read and written once
        self._update = costs.update_cost(workload)  # of body and head together
        self._synced = {
            (layer.name, kind): _cost(layer, kind) + Cost(num_syncs=1)
            for layer in workload.layers
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        }

    def tasks(self, num_steps: int) -> Iterator[Task]:
        """Yield all steps: turns of backward and the next forward, and the hub's between them."""
        lanes = self.placement.lanes
        before: dict[Device, _TaskIds] = dict.fromkeys(lanes, ())
        for device, workers in lanes.items():
            for worker in workers:
                yield from self._fetch(0, worker)
                yield from self._forward(0, worker, before[device])
                before[device] = (self._end(0, Kind.FORWARD, worker),)
        for step in range(num_steps):
            for worker in range(len(self.routes)):
                yield from self._answer(step, worker)
            is_last = step + 1 == num_steps
            for device, workers in lanes.items():
                for worker in workers:
                    yield from self._turn(step, worker, before[device], is_last)
                    kind = Kind.BACKWARD if is_last else Kind.FORWARD
                    before[device] = (self._end(step + (not is_last), kind, worker),)

    def _message(self, step: int, purpose: Purpose, worker: int, after: _TaskIds) -> Iterator[Task]:
        """Yield the stages of one message's route, which follow one another."""
        for kind, on, cost in self.routes[worker][purpose]:
            sent = TaskId(step, kind, purpose, worker)
            yield Task(sent, on, cost, after)
            after = (sent,)

    def _arrival(self, step: int, purpose: Purpose, worker: int) -> TaskId:
        """Return the task after which the receiver can use the message."""
        return TaskId(step, self.routes[worker][purpose][-1].kind, purpose, worker)

    def _fetch(self, step: int, worker: int) -> Iterator[Task]:
        after: _TaskIds = ()
        if step and self.prefetches:
            # As soon as the activation gradients are received, still encoded.
            purpose = Purpose.ACTIVATION_GRADIENTS
            stages = self.routes[worker][purpose]
            received = [stage.kind for stage in stages if stage.kind is not Kind.DECODE][-1]
            after = (TaskId(step - 1, received, purpose, worker),)
            if step > 1:
                after += (TaskId(step - 2, Kind.STEP, "", worker),)
        elif step:
            after = (TaskId(step - 1, Kind.STEP, "", worker),)
        yield from self._message(step, Purpose.PARAMETERS, worker, after)

    def _forward(self, step: int, worker: int, before: _TaskIds) -> Iterator[Task]:
        """Yield the loading of the batch and the body's forward, which needs the parameters."""
        device = self.placement.bodies[worker]
        loaded = TaskId(step, Kind.LOAD, "", worker)
        yield Task(loaded, (costs.compute_lane(device.name),), self._load, before)
        after = (loaded, self._arrival(step, Purpose.PARAMETERS, worker))
        yield from self._layers(step, Kind.FORWARD, self.parts.body, worker, device, after)

    def _answer(self, step: int, worker: int) -> Iterator[Task]:
        """Yield the uploads, the work of the head, and the route of the activation gradients."""
        hub, head = self.placement.hub, self.parts.head
        loaded = TaskId(step, Kind.LOAD, "", worker)
        yield from self._message(step, Purpose.LABELS, worker, (loaded,))
        done = self._end(step, Kind.FORWARD, worker)
        yield from self._message(step, Purpose.ACTIVATIONS, worker, (done,))
        after = tuple(self._arrival(step, p, worker) for p in (Purpose.LABELS, Purpose.ACTIVATIONS))
        yield from self._layers(step, Kind.FORWARD, head, worker, hub, after)
        after = (self._end(step, Kind.FORWARD, worker, head),)
        yield from self._layers(step, Kind.BACKWARD, head, worker, hub, after)
        after = (self._end(step, Kind.BACKWARD, worker, head),)
        yield from self._message(step, Purpose.ACTIVATION_GRADIENTS, worker, after)

    def _turn(self, step: int, worker: int, before: _TaskIds, is_last: bool) -> Iterator[Task]:
        """Yield the body's backward, the update that it completes, and the next forward."""
        device, hub = self.placement.bodies[worker], self.placement.hub
        after = (*before, self._arrival(step, Purpose.ACTIVATION_GRADIENTS, worker))
        yield from self._layers(step, Kind.BACKWARD, self.parts.body, worker, device, after)
        done = (self._end(step, Kind.BACKWARD, worker),)
        yield from self._message(step, Purpose.GRADIENTS, worker, done)
        head_done = self._end(step, Kind.BACKWARD, worker, self.parts.head)
        halves = (self._arrival(step, Purpose.GRADIENTS, worker), head_done)
        updated = TaskId(step, Kind.STEP, "", worker)
        yield Task(updated, (costs.compute_lane(hub.name),), self._update, halves)
        if not is_last:
            yield from self._fetch(step + 1, worker)
            yield from self._forward(step + 1, worker, done)

    def _layers(
        self, step: int, kind: Kind, part: Workload, worker: int, device: Device, after: _TaskIds
    ) -> Iterator[Task]:
        """Yield the layers of a half, one after another; a GPU then tells its host of the end."""
        on = (costs.compute_lane(device.name),)
        layers = part.layers if kind is Kind.FORWARD else part.in_backward_order
        # A head's backward follows its forward at once, on the same device.
        hands_over = kind is Kind.BACKWARD or part is self.parts.body
        for layer in layers:
            cost = _cost(layer, kind)
            if layer is layers[-1] and hands_over and device.kind == DeviceKind.GPU:
                cost = self._synced[layer.name, kind]
            done = TaskId(step, kind, layer.name, worker)
            yield Task(done, on, cost, after)
            after = (done,)

    def _end(self, step: int, kind: Kind, worker: int, part: Workload | None = None) -> TaskId:
        """Return the task with which a forward or backward ends: of the body, or another part."""
        part = part or self.parts.body
        layers = part.layers if kind is Kind.FORWARD else part.in_backward_order
        return TaskId(step, kind, layers[-1].name, worker)


def _cost(layer: Layer, kind: Kind) -> Cost:
    return layer.forward if kind is Kind.FORWARD else layer.backward
