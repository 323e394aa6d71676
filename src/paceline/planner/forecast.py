"""Forecasts: the predicted seconds of a strategy's step on a machine."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from paceline.core.after_backward import AfterBackward, BackwardPhase
from paceline.core.compare import Breakdown, breakdown
from paceline.core.cost import CostModel, Roofline, Slowed, compute_lane
from paceline.core.durations import duration
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import COMMUNICATION, COMPUTE, Kind, Lane, Plan
from paceline.core.simulate import makespan_s, simulate, steady_period
from paceline.core.steps_to_loss import UNKNOWN, StepsToLoss
from paceline.core.strategy import Strategy, Window, codec_fields
from paceline.core.timeline import Span, Timeline, intersection, length, union
from paceline.core.workload import Workload, replica_nbytes
from paceline.planner.ranges import half_width

_WINDOW = 8  # steps: enough for the first, which starts cold, to drop out of the period
_SHORT_WINDOW = 2  # for plans so wide that their steps hardly depend on the one before
_FEWEST_PERIODS = 3  # the first, the last, and one between them
_MOST_LOOKED_AT = 8  # devices: others are like them
_MANY_TASKS = 8_000  # of a step
_COPY_ENGINES = frozenset({Lane.D2H, Lane.H2D})
_SHOWN_SLOWDOWN = 1.005
_ASYNCHRONOUS = (
    "not the same training: workers do not wait for each other, and their gradients are of "
    "parameters that others have changed meanwhile"
)
# Mean absolute error of a predicted step: benchmarks/planner.
ERROR_BAR = 0.06


@dataclass(frozen=True)
class Forecast:
    """The prediction for one strategy: seconds a step, and the parts of a step's time.

    `link_nbytes` are the bytes that a step sends in each direction of each link, `memory_nbytes`
    what each device needs, and each host that holds anything. `placement` says which devices it
    takes; on their own they would reach `alone_samples_per_s` together. `is_balanced`: the workers'
    parts follow their speeds, and the plan knows it. `notes` are sentences to stand beside `why`.
    Between two updates of a device in the timeline lie `steps_per_update` steps: more than one
    where workers take several between two exchanges. `slowdown`: how many times longer computation
    takes than undisturbed (see `core.losses`), through what `slowed_by` names. `after_backward`:
    what the exchange leaves to be done then, where the strategy says so. `is_same_training`: as by
    one worker with the whole batch, but for what a codec rounds; if not, `steps_to_loss` are those
    to the same loss, where they are known.
    """

    strategy: str
    config: Any
    workers: int
    step_s: float
    samples_per_s: float
    link_nbytes: Mapping[str, float]
    memory_nbytes: Mapping[str, int]
    breakdown: Breakdown
    machine: Machine
    timeline: Timeline
    placement: str = "as listed"
    alone_samples_per_s: float | None = None
    is_balanced: bool = False
    notes: tuple[str, ...] = ()
    steps_per_update: float = 1.0
    slowdown: float = 1.0
    slowed_by: tuple[str, ...] = ()
    after_backward: AfterBackward | None = None
    is_same_training: bool = True
    steps_to_loss: StepsToLoss | None = None

    @property
    def learnt_samples_per_s(self) -> float:
        """The samples of synchronous training to the same loss a second; 0 if that is unknown."""
        if self.is_same_training:
            return self.samples_per_s
        return self.samples_per_s / self.steps_to_loss.median if self.steps_to_loss else 0.0

    @property
    def codec(self) -> str | None:
        """The codec by which anything travels."""
        codecs = (getattr(self.config, field) for field in codec_fields(self.config))
        return next((codec for codec in codecs if codec is not None), None)

    @property
    def efficiency(self) -> float | None:
        """Samples a second over what the devices would reach on their own; None if not known."""
        alone = self.alone_samples_per_s
        return None if alone is None else self.samples_per_s / alone

    @property
    def wire_nbytes(self) -> float:
        """The bytes that a step sends over the busiest link, in one direction."""
        return max(self.link_nbytes.values(), default=0.0)

    @cached_property
    def link_busy(self) -> float:
        """The share of the step in which the busiest link is in use."""
        links = [
            sum(span.duration_s for span in track)
            for resource, track in self.timeline.tracks.items()
            if resource.lane is Lane.WIRE
        ]
        num_steps = self.timeline.num_steps() * self.steps_per_update
        return max(links, default=0.0) / num_steps / self.step_s

    @property
    def range_share(self) -> float:
        """How far from `step_s` the median of measured steps is meant to be at most, as a share."""
        return half_width(self.machine, self.breakdown)

    @property
    def range_s(self) -> tuple[float, float]:
        """The seconds between which that median is meant to lie in nine of ten cases."""
        return (1 - self.range_share) * self.step_s, (1 + self.range_share) * self.step_s

    def surely_faster_than(self, other: "Forecast") -> bool:
        """Return True if it trains more samples a second wherever in their ranges both are."""
        slowest, fastest = 1 + self.range_share, 1 - other.range_share
        return self.samples_per_s / slowest > other.samples_per_s / fastest

    @property
    def shown_s(self) -> float:
        """The seconds between two updates of the timeline, of which a drawing shows one."""
        return self.step_s * self.steps_per_update

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker."""
        return tuple(device.name for device in self.machine.devices[: self.workers])

    @property
    def why(self) -> str:
        """One sentence about the parts of the step's time."""
        parts = self.breakdown
        # Asynchronous devices have steps of their own.
        share = 100 / (parts.compute_s + parts.exposed_s + parts.idle_s)
        computing = f"computes {parts.compute_s * share:.0f} % of the step"
        if self.slowdown >= _SHOWN_SLOWDOWN:
            longer = f"{100 * (self.slowdown - 1):.0f} % longer than undisturbed"
            computing += f", {longer}: {', and '.join(self.slowed_by)}"
        if not parts.communication_s:
            return f"{computing}; nothing is exchanged"
        return (
            f"{computing}; {parts.exposed_s * share:.0f} % is communication that shows, "
            f"of {duration(parts.communication_s)}"
        )


def forecast(
    workload: Workload,
    machine: Machine,
    strategy: Strategy,
    config: Any,
    samples_per_step: float,
    cost: CostModel | None = None,
    *,
    balanced: bool = False,
) -> Forecast:
    """Predict a strategy on a machine, priced by the machine's rates or by `cost`.

    `workload` is one worker's part of a step, the largest if the samples do not divide evenly;
    `samples_per_step` are those of all workers. `balanced`: with parts that follow the workers'
    speeds, if the strategy plans them. InvalidInput if the strategy does not fit.
    """
    machine = machine.reached
    model = cost or Roofline.of(machine)
    planning = strategy.planning
    is_balanced = balanced and planning.plan_balanced is not None
    planned = (is_balanced and planning.plan_balanced) or planning.plan

    one = planned(workload, machine, config, Window(1))

    def window(num_steps: int) -> Plan:
        lasting = one.lasting(num_steps)
        return lasting or planned(workload, machine, config, Window(num_steps))

    per_period, alike = planning.steps_per_period(config), planning.repeats_after(config)
    num_steps = _window_steps(len(one), per_period, alike)
    plan = window(num_steps)
    timeline = simulate(plan, model)
    slowdown, slowed_by = _slowdown(timeline.outline, machine, strategy, config)
    if slowdown != 1.0:
        model = Slowed(model, slowdown)
        timeline = simulate(plan, model)
    outline = timeline.outline
    period_s = steady_period(outline, num_steps, alike)
    if period_s is None:
        # The difference of two windows: the first step starts cold, none overlaps with the last.
        period_s = (makespan_s(window(2 * num_steps), model) - timeline.makespan_s) / num_steps
    num_taken = num_steps * per_period
    step_s, notes = _fed(machine, config.workers, samples_per_step, period_s / per_period)
    parts, per_update = breakdown(outline), 1.0
    if per_period > 1:
        per_update = num_taken / outline.num_steps()
        parts = breakdown(_inner_periods(outline, num_steps)).divided(per_update)
    learns_as, caveats = _learning(strategy, workload, config)
    return Forecast(
        strategy.name,
        config,
        config.workers,
        step_s,
        samples_per_step / step_s,
        {link: nbytes / num_taken for link, nbytes in _sent(plan).items()},
        memory(workload, machine, strategy, config),
        parts,
        machine,
        timeline,
        is_balanced=is_balanced,
        notes=(*notes, *_limits(strategy, machine, config, outline), *caveats),
        steps_per_update=per_update,
        slowdown=slowdown,
        slowed_by=slowed_by,
        after_backward=_after_backward(strategy, config, BackwardPhase(plan, model, timeline)),
        is_same_training=not caveats,
        steps_to_loss=learns_as,
    )


def _after_backward(strategy: Strategy, config: Any, phase: BackwardPhase) -> AfterBackward | None:
    """Return what the exchange of several workers leaves, where the strategy says so."""
    if strategy.planning.after_backward is None or config.workers == 1:
        return None
    return strategy.planning.after_backward(phase)


def _window_steps(num_tasks: int, per_period: int, alike: int) -> int:
    """Return the steps of a window, of which each has so many tasks, in whole periods."""
    num_steps = _SHORT_WINDOW if num_tasks > _MANY_TASKS else _WINDOW
    if per_period > 1:
        num_steps = max(num_steps, _FEWEST_PERIODS)
    return -(-num_steps // alike) * alike


def _limits(strategy: Strategy, machine: Machine, config: Any, timeline: Timeline) -> Iterator[str]:
    """Yield what keeps more workers from gaining, where the strategy says so."""
    limit = strategy.planning.limit
    if limit is not None and (sentence := limit(machine, config, timeline)):
        yield sentence


def _learning(
    strategy: Strategy, workload: Workload, config: Any
) -> tuple[StepsToLoss | None, tuple[str, ...]]:
    """Return the steps to a loss, if known, and what differs from synchronous training."""
    planning = strategy.planning
    if planning.steps_to_loss is not None and config.workers > 1:
        found = planning.steps_to_loss(workload, config)
        return found, (UNKNOWN if found is None else found.sentence,)
    return None, (_ASYNCHRONOUS,) if planning.is_asynchronous and config.workers > 1 else ()


def _sent(plan: Plan) -> Mapping[str, float]:
    """Return the bytes that a plan sends in each direction of each link."""
    found: dict[str, float] = defaultdict(float)
    sorts, sort_of = plan.priced_alike
    for number, times in Counter(sort_of).items():
        task = sorts[number]
        for resource in task.on if task.kind in COMMUNICATION else ():
            if resource.lane is Lane.WIRE:
                found[resource.owner] += times * task.cost.nbytes
    return found


def _fed(
    machine: Machine, workers: int, samples_per_step: float, step_s: float
) -> tuple[float, tuple[str, ...]]:
    """Return the seconds of a step of workers that wait for samples if hosts do not keep up."""
    devices = _devices_of(machine, workers)
    on_host = Counter(device.host for device in devices)
    for host in machine.hosts:
        if host.samples_per_s is not None and on_host[host.name]:
            share = on_host[host.name] / min(workers, machine.num_devices)
            wanted = share * samples_per_step
            if wanted > step_s * host.samples_per_s:
                step_s = wanted / host.samples_per_s
                note = f"{host.name} reads {host.samples_per_s:g} samples/s, which is what limits"
                return step_s, (note,)
    return step_s, ()


def _devices_of(machine: Machine, workers: int) -> tuple[Device, ...]:
    """Return the workers' devices, of which some may serve several workers in turns."""
    return machine.first_devices(min(workers, machine.num_devices))


def _slowdown(
    timeline: Timeline, machine: Machine, strategy: Strategy, config: Any
) -> tuple[float, tuple[str, ...]]:
    """Return by how much longer computation takes than in a timeline without losses, and why."""
    some = _devices_of(machine, config.workers)[:_MOST_LOOKED_AT]
    of_all = [one for one in timeline.spans if _is_of_all(one)]
    shares = [_beside(timeline, device, of_all) for device in some]
    hidden, copied = (sum(each) / len(shares) for each in zip(*shares, strict=True))
    num_waiting = 1 if strategy.planning.is_asynchronous else config.workers
    losses, num_steps = machine.usual_losses, strategy.planning.steps_per_period(config)
    causes = {
        "beside exchanges": losses.slowdown(hidden, 1, copied=copied),
        "waiting for the slowest": losses.slowdown(0.0, num_waiting, num_steps),
    }
    slowed_by = tuple(cause for cause, times in causes.items() if times > 1)
    return losses.slowdown(hidden, num_waiting, num_steps, copied=copied), slowed_by


def _is_of_all(span: Span) -> bool:
    """Return True for what is sent for all workers."""
    return span.kind is Kind.SEND and span.worker is None


def _beside(timeline: Timeline, device: Device, of_all: Sequence[Span]) -> tuple[float, float]:
    """Return the exchange beside a device's computation, and its copies alone, as shares of that.

    What its host exchanges for it counts, too: the same cores, memory and bus carry the bytes. Sums
    in the host's memory take nothing from a GPU, which waits for them.
    """
    lane = compute_lane(device.name)
    computing = union(one for one in timeline.tracks.get(lane, ()) if one.kind in COMPUTE)
    exchanges: list[Span] = []
    copies: list[Span] = []
    own_tracks = (track for on, track in timeline.tracks.items() if on.owner == device.name)
    for one in chain(of_all, *own_tracks):
        if one.kind in COMPUTE:
            continue
        own = {on.lane for on in one.on if on.owner == device.name}
        if own & _COPY_ENGINES:
            copies.append(one)
        elif (own and not _is_summed_for_gpu(one, device)) or _is_of_all(one):
            exchanges.append(one)
    whole = length(computing)
    if not whole:
        return 0.0, 0.0
    exchanged = length(intersection(computing, union(exchanges)))
    either = length(intersection(computing, union([*exchanges, *copies])))
    return exchanged / whole, (either - exchanged) / whole


def _is_summed_for_gpu(span: Span, device: Device) -> bool:
    return device.kind == DeviceKind.GPU and any(on.lane is Lane.REDUCE for on in span.on)


def _inner_periods(timeline: Timeline, num_periods: int) -> Timeline:
    """Return the spans from the end of the first period to that of the last but one.

    The first starts cold, and beside the end of the last no steps hide its exchange.
    """
    updates = [span for span in timeline.spans if span.kind is Kind.STEP]
    last_of_first = {span.worker: span.start_s for span in updates if span.step == 0}
    start_s = min(last_of_first.values())
    end_s = max(span.end_s for span in updates if span.step == num_periods - 2)
    inner = (one for one in timeline.spans if one.start_s >= start_s and one.end_s <= end_s)
    return Timeline(inner, timeline.origin)


def memory(
    workload: Workload, machine: Machine, strategy: Strategy, config: Any
) -> Mapping[str, int]:
    """Return the bytes that each device needs, and each host that holds anything, by name."""
    if strategy.planning.memory is not None:
        return strategy.planning.memory(workload, machine, config)
    devices = machine.first_devices(config.workers)
    return {device.name: replica_nbytes(workload) for device in devices}
