"""Time a model's layers and the exchanges between ranks, for the prediction of steps.

All ranks train a copy of the model at the same time, because workers on one host slow each other
down. In a rehearsal, the copy has paced layers, which take the times of the emulated device.

Within an exchange, one layer is summed while the next layer is sent. To simulate this overlap, a
plan (the tasks of a step) needs the time of one large exchange without overlap. This time cannot be
measured. So `single` searches for the time at which the simulated exchange of all layers takes as
long as the measured one.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from paceline.core.cost import CostModel, ProfiledCost, Roofline
from paceline.core.link_fit import ExchangeSample, ExchangeSamples
from paceline.core.losses import Losses
from paceline.core.machine import Machine
from paceline.core.plan import COMPUTE, Kind, Plan, PriceKey, Task
from paceline.core.simulate import makespan_s
from paceline.core.strategy import Prober, Strategy, Window, exchange_name
from paceline.core.timeline import Span
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.exchange.setup import TrainingSetup
from paceline.exchange.step import train_step
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.measure import timing
from paceline.measure.this_machine import speed_of, this_machine
from paceline.measure.timing import CoreTime, Rounds, lost_beside, rounds_of_all, unrest_of
from paceline.record.recorder import Recorder
from paceline.training.models.paced import QUEUED_S

_NUM_WARM_UP = 2
_MOST_ROUNDS, _MOST_TRACED = 400, 100
_SMALL_NBYTES = 1024
# Largest exchange to time: beyond the caches' size, times grow in proportion to the bytes.
_LARGEST_NBYTES = 128 * 2**20
_NUM_HALVINGS = 24
_LAYERS = (Kind.FORWARD, Kind.BACKWARD)
Key = tuple[Kind, str]


@dataclass(frozen=True)
class Profile:
    """Measured times of a step's parts, and of each strategy's gradient exchange, on this machine.

    `durations`: for each device, seconds of each layer's forward and backward, of the optimizer
    step and of loading. `machine`: this machine without links, whose bandwidth depends on the
    strategy. `exchanges`: by strategy, the times of a small and a large exchange, from which
    `Planning.calibrate` derives the links. `lost_beside`: by strategy, the fraction of its
    computing speed that a worker loses while it exchanges gradients.
    """

    machine: Machine
    durations: Mapping[PriceKey, float]
    exchanges: Mapping[str, ExchangeSamples]
    lost_beside: Mapping[str, float] = field(default_factory=dict)

    def calibrated(self, strategy: Strategy, config: Any = None) -> tuple[Machine, ProfiledCost]:
        """Return the machine with links that fit `strategy`, and a cost model of measured times."""
        machine = self.machine
        calibrate, name = strategy.planning.calibrate, exchange_name(strategy.name, config)
        if calibrate is not None and name in self.exchanges:
            machine = calibrate(machine, self.exchanges[name], config)
            beside = {"beside_exchange": self.lost_beside.get(name, 0.0)}
            losses = machine.usual_losses.model_copy(update=beside)
            machine = machine.model_copy(update={"losses": losses})
        return machine, ProfiledCost(self.durations, Roofline.of(machine))

    def slowed(self, times: Mapping[str, float]) -> "Profile":
        """Return a copy whose layer times are multiplied by `times[device name]`."""
        durations = {
            key: seconds * (times[key.owner] if key.kind in _LAYERS else 1.0)
            for key, seconds in self.durations.items()
        }
        return replace(self, durations=durations)

    def rank_seconds(self, factor: float) -> list[float]:
        """Return the computing seconds of a step on each rank, in rank order.

        `factor`: number of samples in the step, relative to the profiled step.
        """
        own_s = {device.name: 0.0 for device in self.machine.devices}
        for key, seconds in self.durations.items():
            if key.kind in _LAYERS:
                own_s[key.owner] += factor * seconds
            elif key.kind is Kind.STEP:
                own_s[key.owner] += seconds
        return list(own_s.values())

    def balanced(self, shares: Sequence[int]) -> "Profile":
        """Return a profile whose devices compute unequal batches; `shares`: samples by rank."""
        names = [device.name for device in self.machine.devices]
        equal = -(-sum(shares) // len(shares))
        return self.slowed({name: own / equal for name, own in zip(names, shares, strict=True)})


def profile(
    setup: TrainingSetup, group: Group, seconds: float, probers: Mapping[str, Prober]
) -> Profile:
    """Time steps of a copy of the model, and exchanges, for about `seconds`; collective.

    `probers`: by name of an exchange, the object that creates its probes, which exchange gradients
    without computing them. Steps and exchanges alternate as in training, so that ranks begin
    exchanges at realistic times.
    """
    clock, copied = clock_for(group.device), copy.deepcopy(setup.model).train()
    recorder = Recorder(clock, "", group.rank)
    optimizer, batches = setup.optimizer(copied), timing.endless(lambda: setup.source(0))
    step = partial(train_step, copied, optimizer, batches, recorder, setup.learning)
    probes = Probes(setup.workload, group, probers)
    works: list[timing.Work] = [step, *probes.works]

    def rounds(number: int) -> Rounds:
        # a round is a step and one exchange of each kind; its row has the seconds of each
        return list(map(list, zip(*timing.timed(works, clock, number), strict=True)))

    # the slowest rank's fastest round, because first rounds also open connections
    slowest = max(min(map(sum, rank)) for rank in group.gather(rounds(_NUM_WARM_UP)))
    number = timing.num_rounds(seconds / 2, slowest, timing.FEWEST_ROUNDS, _MOST_ROUNDS)
    rows = rounds_of_all(partial(rounds, number), group)
    # trace only after the timed rounds, because a trace's hooks slow down layers
    recorder.start_trace(copied)
    rounds(min(number, _MOST_TRACED))
    recorder.stop_trace()
    lost_beside = probes.lost_beside()
    probes.close()
    step_s = _straggling(rows) * median(row[0] for row in rows[group.rank])
    machine, durations = _of_ranks(_parts_of(recorder.spans(), step_s), setup.workload, group)
    exchanges = probes.measured([[row[1:] for row in rank] for rank in rows], machine)
    losses = Losses.none("contained in the profile", unrest_of(rows))
    machine = machine.model_copy(update={"losses": losses})
    return Profile(machine, durations, exchanges, lost_beside)


def _parts_of(spans: Iterable[Span], step_s: float) -> dict[Key, float]:
    """Return the median seconds of each part in `spans`, scaled to add up to `step_s`."""
    parts = timing.median_durations(spans, lambda span: (span.kind, span.part))
    scale = step_s / sum(parts.values())
    return {key: scale * part_s for key, part_s in parts.items()}


def _straggling(rows: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the factor by which delays of single ranks lengthen the step of all ranks.

    `rows`: by rank and round, the seconds of the step and of the exchanges after it. A delay of one
    rank delays all ranks, in the step or in the following exchange. So a step of all ranks takes
    the median of (step + exchange), minus the median exchange. Returns this time, divided by the
    slowest rank's median step.
    """
    typical = max(median(row[0] for row in rank) for rank in rows)
    rounds = list(zip(*rows, strict=True))
    exchanges = [min(row[1] for row in one) if len(one[0]) > 1 else 0.0 for one in rounds]
    steps = [max(row[0] for row in one) for one in rounds]
    together = median(a + b for a, b in zip(steps, exchanges, strict=True)) - median(exchanges)
    return float(together / typical)


def _of_ranks(
    parts: dict[Key, float], workload: Workload, group: Group
) -> tuple[Machine, dict[PriceKey, float]]:
    rows = group.gather([[kind.value, part, seconds] for (kind, part), seconds in parts.items()])
    measured = [[(Kind(kind), part, seconds) for kind, part, seconds in row] for row in rows]
    layers_s = [sum(seconds for kind, _, seconds in row if kind in _LAYERS) for row in measured]
    machine = this_machine(group, [speed_of(workload, seconds) for seconds in layers_s])
    durations = {
        PriceKey(device.name, kind, part): seconds
        for device, row in zip(machine.devices, measured, strict=True)
        for kind, part, seconds in row
    }
    return machine, durations


class _Probed:
    """Two exchanges to time for a strategy: one of the model's layers, one of small layers.

    On several hosts, or without chunks, the second exchange has one small layer, in one chunk. With
    chunks on one host, it has as many small layers as the model has layers, in `num_chunks` chunks,
    because the exchange's threads wake only once for all chunks of a step.
    """

    def __init__(self, prober: Prober, layers: Workload, group: Group) -> None:
        num_layers = self.num_chunks = 1
        chunk: int | None = getattr(prober.config, "first_chunk", None)
        if chunk is not None and len({one.place for one in group.members}) == 1:
            num_layers = len(layers.layers)
            self.num_chunks = -(-num_layers // chunk)
        sizes = [[one.nbytes for one in layer.parameters] for layer in layers.in_backward_order]
        self.prober = prober
        self.probes = prober.make(sizes), prober.make([[_SMALL_NBYTES]] * num_layers)
        self.of_all, self.of_small = map(CoreTime, self.probes)


class Probes:
    """Creates and times two exchanges of each strategy, on all ranks; a single rank has none."""

    def __init__(self, workload: Workload, group: Group, probers: Mapping[str, Prober]) -> None:
        self._layers, self._group = exchanging(workload), group
        self._probed = {
            name: _Probed(prober, self._layers, group)
            for name, prober in probers.items()
            if group.world_size > 1
        }

    @property
    def works(self) -> list[CoreTime]:
        """The exchanges to time, two for each strategy: one of all layers, one of small layers."""
        return [work for one in self._probed.values() for work in (one.of_all, one.of_small)]

    def lost_beside(self) -> dict[str, float]:
        """Return by strategy the fraction of its computing speed that a worker loses in exchanges.

        This is the maximum over ranks, because a rank that waits uses less of its cores. The result
        is empty for GPUs, because exchanges do not slow them down. It is also empty if all ranks
        are on one host, because plans then reserve cores for exchanges.
        """
        group = self._group
        places = [member.place for member in group.members]
        if group.device.type != "cpu" or len(set(places)) == 1:
            return {}
        num_workers = places.count(places[group.rank])
        own = {
            name: lost_beside(one.of_all.num_cores, num_workers)
            for name, one in self._probed.items()
        }
        rows = group.gather(own)
        return {name: max(row[name] for row in rows) for name in own}

    def measured(
        self, ranks: Sequence[Sequence[Sequence[float]]], machine: Machine
    ) -> dict[str, ExchangeSamples]:
        """Return by strategy the times of a small and a large exchange, from measured rounds.

        `ranks`: for each rank, a row per round with the seconds of all `works`. A round's time is
        the shortest of all ranks, because a rank that begins an exchange early also waits.
        """
        rounds = zip(*ranks, strict=True)
        shortest = [map(min, zip(*of_ranks, strict=True)) for of_ranks in rounds]
        medians = [median(column) for column in zip(*shortest, strict=True)]
        pairs = zip(medians[::2], medians[1::2], strict=True)
        return {
            name: single(one.prober, machine, self._layers, small_s / one.num_chunks, all_s)
            for (name, one), (all_s, small_s) in zip(self._probed.items(), pairs, strict=True)
        }

    def close(self) -> None:
        """Release the buffers and threads of all exchanges."""
        for one in self._probed.values():
            for probe in one.probes:
                probe.close()


def exchanging(workload: Workload) -> Workload:
    """Return a workload with the gradients of `workload`, but without computation.

    If all gradients have more than `_LARGEST_NBYTES` bytes, they are scaled down to this total. If
    they have less than `2 * _SMALL_NBYTES` bytes, one layer of `2 * _SMALL_NBYTES` replaces them.
    """
    nbytes = workload.gradient_nbytes
    share = min(1.0, _LARGEST_NBYTES / max(nbytes, 1))
    sizes = {
        layer.name: {one.name: share * one.nbytes for one in layer.parameters}
        for layer in workload.in_backward_order
        if layer.parameters
    }
    if nbytes < 2 * _SMALL_NBYTES:
        sizes = {"all": {"all.weight": 2.0 * _SMALL_NBYTES}}

    def layer_of(name: str, sizes: Mapping[str, float]) -> Layer:
        parameters = (Parameter(one, (max(1, int(size / 4)),)) for one, size in sizes.items())
        return Layer(name, tuple(parameters), 0, Cost(), Cost())

    layers = tuple(layer_of(*one) for one in sizes.items())
    return Workload(workload.name, 1, layers, tuple(range(len(layers))), 0)


def single(
    prober: Prober, machine: Machine, layers: Workload, small_s: float, all_s: float
) -> ExchangeSamples:
    """Return the times of a small and a large exchange, fitted to the measured `all_s`.

    `all_s`: the time to exchange all `layers`, whose sums and messages overlap. The small exchange
    takes the measured `small_s`. The large exchange sends the same bytes as one tensor, without
    overlap; its time is the one at which simulated `layers` take `all_s`. If this would be less
    than `small_s`, both times are equal, and less than `small_s`.
    """

    def pair(small: float, large: float) -> ExchangeSamples:
        return ExchangeSample(_SMALL_NBYTES, small), ExchangeSample(layers.gradient_nbytes, large)

    def takes(small: float, large: float) -> float:
        planning = prober.strategy.planning
        assert planning.calibrate is not None  # every strategy that has a prober has this function
        measured = pair(small, large)
        found = planning.calibrate(machine, measured, prober.config)
        plan = planning.plan(layers, found, prober.config, Window(1))
        return makespan_s(plan, _Exchanging(Roofline.of(found)))

    if takes(small_s, small_s) > all_s:
        alike_s = small_s * _argument_of(lambda x: takes(x * small_s, x * small_s), all_s, 1e-3, 1)
        return pair(alike_s, alike_s)
    most = max(2.0, 4 * all_s / small_s)
    slower = _argument_of(lambda x: takes(small_s, x * small_s), all_s, 1, most)
    return pair(small_s, slower * small_s)


def _argument_of(of: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Return x with `of(x) == value` for an increasing function, by bisection in [low, high]."""
    for _ in range(_NUM_HALVINGS):
        middle = (low * high) ** 0.5
        if of(middle) < value:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class _Exchanging:
    """Cost model in which computing takes no time; `prices` has the times of other tasks."""

    prices: CostModel

    def seconds(self, task: Task) -> float:
        return 0.0 if task.kind in COMPUTE else self.prices.seconds(task)


def with_idle_cores(machine: Machine) -> Machine:
    """Return a rehearsal's machine, whose sleeping layers leave cores idle for exchanges."""
    losses = machine.usual_losses.model_copy(update={"beside_exchange": 0.0, "beside_copies": None})
    return machine.with_each("links", uses_cores=False).model_copy(update={"losses": losses})


def beside_copies(plan: Plan, cost: ProfiledCost) -> ProfiledCost:
    """Return a cost model in which a copy of gradients shortens the layers after it.

    In a rehearsal, a layer sleeps until a planned time, so if a copy delays its start, it sleeps
    less. Only a copy that takes longer than the next layer and than `QUEUED_S` delays the step.
    """
    durations = dict(cost.durations)
    copied, behind = defaultdict[str, float](float), defaultdict[str, float](float)
    for task in plan.tasks:
        owner = task.on[0].owner
        if task.kind is Kind.D2H:
            copied[owner] += cost.seconds(task)
        elif task.kind is Kind.BACKWARD:
            key, copy_s = task.price_key, copied.pop(owner, 0.0)
            late = copy_s > max(durations[key], QUEUED_S)
            behind[owner] = 0.0 if late else behind[owner] + copy_s
            made_up = min(behind[owner], durations[key])
            behind[owner] -= made_up
            durations[key] -= made_up
    return replace(cost, durations=durations)
