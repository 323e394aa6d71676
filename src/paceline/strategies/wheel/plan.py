"""Plan strategy wheel: workers train a model's first layers, the hub the last layers.

    body 0 compute  fwd 0 | fwd 1 | bwd 0  fwd 0 | bwd 1  fwd 1 | bwd 0  ...
    to the hub            [act 0]  [act 1]  [grad 0][act 0]  [grad 1][act 1]
    hub compute                  head 0  head 1  step 0  head 0   step 1  head 1
    to the body                    [res 0][par 0]    [res 1][par 1]

    body: first layers; head: last layers; act: activations; grad: gradients of the body;
    res: activation gradients; par: parameters of the body; step: optimizer step

The workers of a device compute in turn, in a fixed order, so that the device computes while
messages are sent. In its turn, a worker computes a backward pass and its next forward pass (figure
3 of Du et al. 2017). A worker fetches the parameters of its next forward pass as soon as its
activation gradients arrive; the update with the worker's last gradients is not yet in these
parameters. With one worker per device, the worker fetches the parameters after its update instead;
a run with a single worker then trains the model as if it were not cut.

The server updates all parameters when it has the gradients of body and head of a step (section
3.3). Server and head share the hub's device, and the head reads the parameters in place. In a tree
of hubs (section 3.4.1) a child hub runs the head for its workers, and the root the server
(`hubs_plan`).
"""

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from math import ceil

from paceline.core import cost as costs
from paceline.core.cutting import LOSS
from paceline.core.machine import Device, DeviceKind, Host, Machine, Station
from paceline.core.plan import COMPUTE, Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.strategy import Window
from paceline.core.timeline import Timeline
from paceline.core.wire_format import Purpose
from paceline.core.workload import Layer, Workload, feature_nbytes
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.hubs_plan import HubExchanges
from paceline.strategies.wheel.routes import (
    Message,
    RouteStage,
    TaskIds,
    place,
    routes,
    server_of,
    stages,
    updating_on,
)
from paceline.strategies.wheel.split import MessageSize, messages, split

_KEPT_BY_SERVER = 2  # number of vectors of the model's size: the parameters and their momentum
# A hub can be a bottleneck if it is busy for at least this share of the planned time. The share is
# below 1, because only workers compute at the beginning and end.
_SATURATED = 0.8
_MOST_CHILD_HUBS = 8  # largest number of child hubs that a search tries
_KEPT_BY_CHILD = 3  # number of vectors of the model's size: parameters, sum and mean of gradients
_LENT = 2  # number of vectors of the head's size on the hub's device: parameters and gradients


def plan(workload: Workload, machine: Machine, config: Wheel, window: Window) -> Plan:
    """Plan `window.num_steps` steps; in each step every worker trains on its share of a batch.

    Raises InvalidInput if the model has no suitable head, or if the machine lacks devices, links or
    the speed of a codec.
    """
    return Plan(_WindowTasks(workload, machine, config).tasks(window.num_steps))


def memory(workload: Workload, machine: Machine, config: Wheel) -> Mapping[str, int]:
    """Return the bytes that each device or host needs, by name.

    A hub keeps the parameters, their momentum, and one step's waiting gradients for each worker. A
    worker keeps the body's parameters and gradients; with several lanes also the parameters of its
    next step. A child hub keeps a sum and a mean of gradients instead of momentum, and the parent
    keeps one mean for each child hub. With `server_memory="host"`, the server uses the memory of
    the hub's host; the hub's device has the head's parameters and gradients only during an answer.
    """
    placement, parts = place(machine, config), split(workload, config)
    crossing, body = parts.head.input_nbytes, parts.body.gradient_nbytes
    whole, heads = workload.gradient_nbytes, dict.fromkeys(placement.heads)
    answering = config.workers_of_hub * crossing + feature_nbytes(parts.head.layers)
    kept = config.workers_of_hub * whole
    kept += (_KEPT_BY_CHILD if config.child_hubs else _KEPT_BY_SERVER) * whole
    by_server = dict.fromkeys(heads, kept)
    if config.child_hubs:
        by_server[placement.hub] = (_KEPT_BY_SERVER + config.child_hubs) * whole
    hubs: dict[str, int] = defaultdict(int)
    for hub, nbytes in by_server.items():
        server = server_of(machine, hub, config)
        hubs[server.name] += nbytes
        if hub in heads:
            hubs[hub.name] += answering
            hubs[hub.name] += _LENT * parts.head.gradient_nbytes if server != hub else 0
    num_copies = 3 if config.lanes > 1 else 2
    lane = num_copies * body + feature_nbytes(parts.body.layers) + parts.body.input_nbytes
    lanes = {device.name: lane * len(workers) for device, workers in placement.lanes.items()}
    return {**hubs, **lanes}


def placements(workload: Workload, config: Wheel) -> Iterator[Wheel]:
    """Yield the configuration, and variants with child hubs or a server in main memory.

    A server in main memory suits devices with little memory (section 3.4.2).
    """
    counts = [config.child_hubs]
    if config.child_hubs == 0 and config.head != LOSS:
        most = min(config.workers, _MOST_CHILD_HUBS)
        counts += [count for count in range(2, most + 1) if config.workers % count == 0]
    for memory in dict.fromkeys((config.server_memory, "host")):
        for count in counts:
            yield replace(config, child_hubs=count, server_memory=memory)


def limit(machine: Machine, config: Wheel, timeline: Timeline) -> str | None:
    """Return a sentence about the hub if a hub is the bottleneck, otherwise None.

    A hub is the bottleneck if its device computes longer than the average device of its workers.
    The ratio of these times is p k / t of section 3.4.1, but includes updates. If the ratio is
    above 1, more workers do not help. A hub that often waits for messages is no bottleneck.
    """
    placement = place(machine, config)
    busy: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        if span.kind in COMPUTE:
            for resource in span.on:
                busy[resource.owner] += span.duration_s
    served: dict[Device, set[Device]] = defaultdict(set)
    for hub, body in zip(placement.heads, placement.bodies, strict=True):
        served[hub].add(body)

    def ratio_of(hub: Device) -> float:
        bodies = [busy[body.name] for body in served[hub]]
        return busy[hub.name] * len(bodies) / sum(bodies)

    busiest = max(served, key=ratio_of)
    ratio, share = ratio_of(busiest), busy[busiest.name] / timeline.makespan_s
    if ratio <= 1 or share < _SATURATED:
        return None
    return (
        f"{busiest.name} is the bottleneck: the last layers and updates take {ratio:.2f} times as "
        "long as a worker's device computes (p k / t); "
        f"use {len(served) * ceil(ratio)} devices with last layers (child_hubs), or fewer workers"
    )


class _WindowTasks:
    """Plans the tasks of a run, except exchanges between hubs, which `HubExchanges` plans."""

    def __init__(self, workload: Workload, machine: Machine, config: Wheel) -> None:
        self.placement, self.parts = place(machine, config), split(workload, config)
        self.prefetches = config.lanes > 1  # workers fetch parameters before their update is done
        placement, sent = self.placement, messages(self.parts, config)
        devices = list(dict.fromkeys((placement.hub, *placement.heads, *placement.lanes)))
        self._computing = {
            device.name: costs.computing_on(device, machine.host_of(device), devices)
            for device in devices
        }
        self.routes: list[dict[Purpose, tuple[RouteStage, ...]]] = []
        for body, hub in zip(placement.bodies, placement.heads, strict=True):
            server = server_of(machine, hub, config)
            lent = self._lending(machine, hub, server, sent[Purpose.HEAD_PARAMETERS])
            self.routes.append(routes(machine, body, hub, server, sent) | lent)
        root = server_of(machine, placement.hub, config)
        self._updating = updating_on(root, self._computing[placement.hub.name])
        self.hubs: HubExchanges | None = None
        if config.child_hubs:
            self.hubs = HubExchanges(workload, machine, config, placement, self._updating)
        # Create each `Cost` once, because the planner caches the time of a `Cost` by its identity.
        self._load = Cost(nbytes=2 * workload.input_nbytes, num_calls=1)  # reads and writes inputs
        self._update = costs.update_cost(workload)  # the update of body and head together
        if isinstance(root, Host):  # updates in main memory have no latency per kernel
            self._update = Cost(nbytes=self._update.nbytes)
        self._synced = {
            (layer.name, kind): _cost(layer, kind) + Cost(num_syncs=1)
            for layer in workload.layers
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        }

    def tasks(self, num_steps: int) -> Iterator[Task]:
        """Yield the tasks of all steps, in the order in which workers compute."""
        lanes = self.placement.lanes
        turns = [(device, worker) for device, workers in lanes.items() for worker in workers]
        # If the root waits for all child hubs, all workers begin the next step together.
        are_together = self.hubs is not None and self.hubs.in_step
        groups = [turns] if are_together else [[turn] for turn in turns]
        before: dict[Device, TaskIds] = dict.fromkeys(lanes, ())
        forward, answered = dict[int, TaskIds](), dict[int, TaskIds]()
        for device, worker in turns:
            forward[worker] = yield from self._begin(0, worker, before[device])
            before[device] = forward[worker]
        for step in range(num_steps):
            for worker in range(len(self.routes)):
                answered[worker] = yield from self._answer(step, worker, forward[worker])
            for group in groups:
                for device, worker in group:
                    own = before[device], answered[worker]
                    before[device] = yield from self._backward(step, worker, *own)
                if self.hubs is not None:
                    yield from self.hubs.replies()
                for device, worker in group if step + 1 < num_steps else ():
                    forward[worker] = yield from self._begin(step + 1, worker, before[device])
                    before[device] = forward[worker]

    def _message(self, step: int, purpose: Purpose, worker: int) -> Message:
        return Message(self.routes[worker][purpose], step, purpose, worker)

    def _held_by_hub(self, step: int, worker: int) -> TaskId:
        """Return the task after which the hub has summed or applied a worker's gradients."""
        update = TaskId(step, Kind.STEP, "", worker)
        return update if self.hubs is None else self.hubs.summed(step, worker)

    def _begin(self, step: int, worker: int, before: TaskIds) -> Generator[Task, None, TaskIds]:
        """Yield a fetch of parameters, and the body's forward pass; return the last task.

        `before`: the previous tasks of the worker's device.
        """
        fetch = self._message(step, Purpose.PARAMETERS, worker)
        fetched = yield from fetch.tasks(self._before_fetch(step, worker))
        loaded = TaskId(step, Kind.LOAD, "", worker)
        computing = self._computing[self.placement.bodies[worker].name]
        yield Task(loaded, computing, self._load, before)
        after = (loaded, *fetched)
        return (yield from self._layers(step, Kind.FORWARD, self.parts.body, worker, after))

    def _before_fetch(self, step: int, worker: int) -> TaskIds:
        after: TaskIds = ()
        if step and self.prefetches:
            # Fetch as soon as the activation gradients arrive, before they are decoded.
            before = self._message(step - 1, Purpose.ACTIVATION_GRADIENTS, worker)
            after = before.arrival(decoded=False)
            if step > 1:
                after += (self._held_by_hub(step - 2, worker),)
        elif step:
            after = (self._held_by_hub(step - 1, worker),)
        if self.hubs is not None:
            after += self.hubs.before_fetch(worker)
        return after

    def _answer(self, step: int, worker: int, forward: TaskIds) -> Generator[Task, None, TaskIds]:
        """Yield the tasks of a hub's answer: receive activations, run the head, send gradients.

        Returns the tasks after which the server has the head's gradients or, for a head without
        layers, the activations. `forward`: the last task of the body's forward pass.
        """

        def send(purpose: Purpose, after: TaskIds) -> Generator[Task, None, TaskIds]:
            return self._message(step, purpose, worker).tasks(after)

        head, is_lent = self.parts.head, Purpose.HEAD_PARAMETERS in self.routes[worker]
        labels = yield from send(Purpose.LABELS, (TaskId(step, Kind.LOAD, "", worker),))
        after = labels + (yield from send(Purpose.ACTIVATIONS, forward))
        if is_lent:
            after = yield from send(Purpose.HEAD_PARAMETERS, after)
        after = yield from self._layers(step, Kind.FORWARD, head, worker, after)
        after = yield from self._layers(step, Kind.BACKWARD, head, worker, after)
        if is_lent:
            after = yield from send(Purpose.HEAD_GRADIENTS, after)
        yield from send(Purpose.ACTIVATION_GRADIENTS, after)
        return after

    def _lending(
        self, machine: Machine, hub: Device, server: Station, head: MessageSize
    ) -> dict[Purpose, tuple[RouteStage, ...]]:
        """Return the copies of the head's parameters and gradients between main memory and device.

        The result is empty if the server keeps the head on the hub's device.
        """
        if not (isinstance(server, Host) and head.num_values):
            return {}
        lane, on = Resource(hub.name, Lane.DOWNLOAD), self._computing[hub.name]
        *_, there = stages(machine, server, hub, lane, head)
        back, *_ = stages(machine, hub, server, lane, head)
        return {  # these copies of the head block the hub's thread, so it cannot compute
            Purpose.HEAD_PARAMETERS: (there._replace(on=(*on, *there.on)),),
            Purpose.HEAD_GRADIENTS: (back._replace(on=(*on, *back.on)),),
        }

    def _backward(
        self, step: int, worker: int, before: TaskIds, answered: TaskIds
    ) -> Generator[Task, None, TaskIds]:
        """Yield the body's backward pass and the update; return the last task of the pass.

        `before`: the previous tasks of the worker's device. `answered`: see `_answer`.
        """
        after = (*before, *self._message(step, Purpose.ACTIVATION_GRADIENTS, worker).arrival())
        done = yield from self._layers(step, Kind.BACKWARD, self.parts.body, worker, after)
        arrived = yield from self._message(step, Purpose.GRADIENTS, worker).tasks(done)
        halves = (*arrived, *answered)
        if self.hubs is not None:
            yield from self.hubs.add(step, worker, halves)
        else:
            yield Task(self._held_by_hub(step, worker), self._updating, self._update, halves)
        return done

    def _layers(
        self, step: int, kind: Kind, part: Workload, worker: int, after: TaskIds
    ) -> Generator[Task, None, TaskIds]:
        """Yield a forward or backward pass of `part` (body or head), and return its last task.

        The pass begins after the tasks `after`, and returns `after` if `part` has no layers. A GPU
        synchronises with the host at the end, except after the forward pass of the head.
        """
        is_body = part is self.parts.body
        device = (self.placement.bodies if is_body else self.placement.heads)[worker]
        layers = part.layers if kind is Kind.FORWARD else part.in_backward_order
        # The host does not wait for the GPU between the head's forward and backward passes.
        hands_over = kind is Kind.BACKWARD or is_body
        for layer in layers:
            cost = _cost(layer, kind)
            if layer is layers[-1] and hands_over and device.kind == DeviceKind.GPU:
                cost = self._synced[layer.name, kind]
            done = TaskId(step, kind, layer.name, worker)
            yield Task(done, self._computing[device.name], cost, after)
            after = (done,)
        return after


def _cost(layer: Layer, kind: Kind) -> Cost:
    return layer.forward if kind is Kind.FORWARD else layer.backward
