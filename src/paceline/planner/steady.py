"""The steady state of a strategy's steps, simulated: their period, its parts, and what slows it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from paceline.core.after_backward import AfterBackward, BackwardPhase
from paceline.core.compare import Breakdown, breakdown
from paceline.core.cost import CostModel, Slowed, compute_lane
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import COMMUNICATION, COMPUTE, Kind, Lane, Plan
from paceline.core.simulate import LOOKED_AT, makespan_s, simulate, steady_period
from paceline.core.timeline import Origin, Span, Timeline, intersection, length, union
from paceline.planner.grouping import Windows

_WINDOW = 8  # steps: enough for the first, which starts cold, to drop out of the period
_IN_STEP = 4, 2  # where all wait for each other in each step: two between the first and the last
_SHORT_WINDOW = 2  # for plans so wide that their steps hardly depend on the one before
_FEWEST_PERIODS = 3  # the first, the last, and one between them
_MOST_LOOKED_AT = 8  # devices: others are like them
_MANY_TASKS = 8_000  # of a step
_COPY_ENGINES = frozenset({Lane.D2H, Lane.H2D})
_COPY, _EXCHANGE = "copy", "exchange"


@dataclass(frozen=True)
class Steady:
    """A window of steps in the steady state, and what a step of it takes.

    `wire_s` are the seconds in which the busiest link is in use, `link_nbytes` the bytes that each
    direction of a link carries. `outline` has the spans of groups of layers, `timeline` those of
    all layers. The other fields are those of `Forecast`.
    """

    step_s: float
    wire_s: float
    link_nbytes: Mapping[str, float]
    breakdown: Breakdown
    outline: Timeline
    timeline: Timeline
    steps_per_update: float
    slowdown: float
    slowed_by: tuple[str, ...]
    after_backward: AfterBackward | None

    @classmethod
    def of(cls, windows: Windows) -> "Steady":
        """Simulate a window, as often as it takes to know what slows it and its period."""
        config, planning = windows.config, windows.strategy.planning
        per_period, alike = planning.steps_per_period(config), planning.repeats_after(config)
        for num_steps, looked_at in _window_steps(windows, per_period, alike):
            plan, cost = windows.of(num_steps), windows.cost
            outline = simulate(plan, cost)
            slowdown, slowed_by = _slowdown(outline, windows)
            if slowdown != 1.0:
                cost = Slowed(cost, slowdown)
                outline = simulate(plan, cost)
            period_s = steady_period(outline, num_steps, alike, looked_at)
            if period_s is not None:
                break
        if period_s is None:
            # The first step starts cold, and none overlaps with the last: take two windows.
            longer_s = makespan_s(windows.of(2 * num_steps), cost)
            period_s = (longer_s - outline.makespan_s) / num_steps
        num_taken, per_update = num_steps * per_period, 1.0
        inner = outline
        if per_period > 1:
            per_update = num_taken / outline.num_steps()
            inner = _inner_periods(outline, num_steps)
        priced = Slowed(windows.model, slowdown)
        return cls(
            period_s / per_period,
            _wire_s(outline) / outline.num_steps() / per_update,
            {link: nbytes / num_taken for link, nbytes in _sent(plan).items()},
            breakdown(inner).divided(per_update),
            outline,
            _in_layers(windows, num_steps, priced, outline),
            per_update,
            slowdown,
            slowed_by,
            _after_backward(windows, priced),
        )


def _in_layers(windows: Windows, num_steps: int, cost: CostModel, outline: Timeline) -> Timeline:
    """Return the same timeline with the spans of all layers, which are made on first use."""

    def spans() -> Iterator[Span]:
        yield from simulate(windows.of_layers(num_steps), cost).spans

    return Timeline(spans(), Origin.PREDICTED, (outline.start_s, outline.end_s))


def _after_backward(windows: Windows, cost: CostModel) -> AfterBackward | None:
    """Return what the exchange of several workers leaves, where the strategy says so."""
    told = windows.strategy.planning.after_backward
    if told is None or windows.config.workers == 1:
        return None
    return told(BackwardPhase(windows.step, cost, simulate(windows.step, cost)))


def _wire_s(outline: Timeline) -> float:
    """Return the seconds in which the busiest direction of a link is in use."""
    tracks = (track for on, track in outline.tracks.items() if on.lane is Lane.WIRE)
    return max((sum(span.duration_s for span in track) for track in tracks), default=0.0)


def _window_steps(windows: Windows, per_period: int, alike: int) -> Iterator[tuple[int, int]]:
    """Yield the steps of windows, in whole periods, and how many periods of them to look at."""
    is_wide = len(windows.step) > _MANY_TASKS
    in_step = per_period == alike == 1 and not windows.strategy.planning.is_asynchronous
    if in_step and not is_wide and not windows.is_grouped:  # where each step has many tasks
        yield _IN_STEP
    num_steps = _SHORT_WINDOW if is_wide else _WINDOW
    if per_period > 1:
        num_steps = max(num_steps, _FEWEST_PERIODS)
    yield -(-num_steps // alike) * alike, LOOKED_AT


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


def devices_of(machine: Machine, workers: int) -> tuple[Device, ...]:
    """Return the workers' devices, of which some may serve several workers in turns."""
    return machine.first_devices(min(workers, machine.num_devices))


def _slowdown(outline: Timeline, windows: Windows) -> tuple[float, tuple[str, ...]]:
    """Return by how much longer computation takes than in a timeline without losses, and why."""
    config, planning = windows.config, windows.strategy.planning
    some = devices_of(windows.machine, config.workers)[:_MOST_LOOKED_AT]
    of_all = [one for one in outline.spans if _is_of_all(one)]
    shares = [_beside(outline, device, of_all) for device in some]
    hidden, copied = (sum(each) / len(shares) for each in zip(*shares, strict=True))
    num_waiting = 1 if planning.is_asynchronous else config.workers
    losses, num_steps = windows.machine.usual_losses, planning.steps_per_period(config)
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
    own_tracks = (track for on, track in timeline.tracks.items() if on.owner == device.name)
    kinds: dict[int, str] = {}  # by the identity of what is held: few sets are, by many spans
    spans: dict[str, list[Span]] = {_COPY: [], _EXCHANGE: list(of_all), "": []}
    for one in chain.from_iterable(own_tracks):
        if one.kind in COMPUTE:
            continue
        kind = kinds.get(id(one.on))
        if kind is None:
            kind = kinds[id(one.on)] = _kind_of(one, device)
        spans[kind].append(one)
    whole = length(computing)
    if not whole:
        return 0.0, 0.0
    exchanges = spans[_EXCHANGE]
    exchanged = length(intersection(computing, union(exchanges)))
    either = length(intersection(computing, union([*exchanges, *spans[_COPY]])))
    return exchanged / whole, (either - exchanged) / whole


def _kind_of(span: Span, device: Device) -> str:
    """Return what a span on a device's own lanes is to the device: a copy, an exchange, or ""."""
    if any(on.owner == device.name and on.lane in _COPY_ENGINES for on in span.on):
        return _COPY
    is_summed = device.kind == DeviceKind.GPU and any(on.lane is Lane.REDUCE for on in span.on)
    return "" if is_summed else _EXCHANGE


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
