"""Simulate a strategy until its steps repeat, and return the step of this steady state.

A period is the part of a plan that ends with one exchange: one step, or all local steps between two
exchanges of strategy local.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from paceline.core.after_backward import AfterBackward, after_backward
from paceline.core.compare import Breakdown, breakdown
from paceline.core.cost import CostModel, Slowed
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import COMMUNICATION, COMPUTE, Kind, Lane, Plan, Resource
from paceline.core.simulate import makespan_s, simulate, steady_period
from paceline.core.timeline import Origin, Span, Timeline, intersection, length, union
from paceline.planner.grouping import Windows

_WINDOW = 8  # number of simulated steps; several, because the first steps are not typical
_SHORT_WINDOW = 2  # number of simulated steps if a step has many tasks: such steps hardly overlap
_FEWEST_PERIODS = 3  # fewest simulated periods of local steps; the first and last are not typical
_MOST_SAMPLED = 8  # maximum number of devices whose slowdown is computed
_MANY_TASKS = 8_000  # if a step has more tasks, only _SHORT_WINDOW steps are simulated


@dataclass(frozen=True)
class Steady:
    """The time, breakdown and traffic of a step in the steady state.

    `link_nbytes`: bytes sent per step over each link, by direction. `timeline`: consecutive steps.
    `steps_per_update`: number of steps from one weight update in `timeline` to the next.
    `slowdown`: factor by which disturbances lengthen computation (`core.losses`). `slowed_by`:
    the disturbances. `after_backward`: the communication left after backward; None if the
    strategy does not report it. `limit`: a sentence about what limits the gain of further workers,
    or None.
    """

    step_s: float
    link_nbytes: Mapping[str, float]
    breakdown: Breakdown
    timeline: Timeline
    steps_per_update: float
    slowdown: float
    slowed_by: tuple[str, ...]
    after_backward: AfterBackward | None
    limit: str | None


def steady(windows: Windows) -> Steady:
    """Simulate consecutive steps of a strategy, and return a step of the steady state."""
    config, planning = windows.config, windows.strategy.planning
    per_period, alike = planning.steps_per_period(config), planning.repeats_after(config)
    num_steps = _window_steps(windows, per_period, alike)
    plan, cost = windows.of(num_steps), windows.cost
    outline = simulate(plan, cost)
    slowdown, slowed_by = _slowdown(outline, windows)
    if slowdown != 1.0:
        cost = Slowed(cost, slowdown)
        outline = simulate(plan, cost)
    period_s = steady_period(outline, num_steps, alike)
    if period_s is None:
        # Subtract two windows' times: the effects of their first and last steps cancel.
        longer_s = makespan_s(windows.of(2 * num_steps), cost)
        period_s = (longer_s - outline.makespan_s) / num_steps
    num_taken, per_update, inner = num_steps * per_period, 1.0, outline
    if per_period > 1:
        per_update = num_taken / outline.num_steps()
        inner = _inner_periods(outline, num_steps)
    priced = Slowed(windows.model, slowdown)
    after = None
    if planning.reports_after_backward and config.workers > 1:
        after = after_backward(windows.step, priced, simulate(windows.step, priced))
    limit = planning.limit and planning.limit(windows.machine, config, outline)
    return Steady(
        period_s / per_period,
        {link: nbytes / num_taken for link, nbytes in _sent(plan).items()},
        breakdown(inner).divided(per_update),
        _in_layers(windows, num_steps, priced, outline),
        per_update,
        slowdown,
        slowed_by,
        after,
        limit,
    )


def _in_layers(windows: Windows, num_steps: int, cost: CostModel, outline: Timeline) -> Timeline:
    """Return the timeline with every layer separate, not in groups; simulated on first use."""

    def spans() -> Iterator[Span]:
        yield from simulate(windows.of_layers(num_steps), cost).spans

    return Timeline(spans(), Origin.PREDICTED, (outline.start_s, outline.end_s))


def _window_steps(windows: Windows, per_period: int, alike: int) -> int:
    """Return the number of steps to simulate, a multiple of `alike`.

    `per_period`: number of local steps between exchanges. `alike`: number of steps after which the
    plan repeats.
    """
    num_steps = _SHORT_WINDOW if len(windows.step) > _MANY_TASKS else _WINDOW
    if per_period > 1:
        num_steps = max(num_steps, _FEWEST_PERIODS)
    return -(-num_steps // alike) * alike


def _sent(plan: Plan) -> Mapping[str, float]:
    """Return the bytes that a plan sends over each link, by direction."""
    found: dict[str, float] = defaultdict(float)
    sorts, sort_of = plan.priced_alike
    for number, times in Counter(sort_of).items():
        task = sorts[number]
        for resource in task.on if task.kind in COMMUNICATION else ():
            if resource.lane is Lane.WIRE:
                found[resource.owner] += times * task.cost.nbytes
    return found


def devices_of(machine: Machine, workers: int) -> tuple[Device, ...]:
    """Return the workers' devices; workers may share devices, so there may be fewer devices."""
    return machine.first_devices(min(workers, machine.num_devices))


def _slowdown(outline: Timeline, windows: Windows) -> tuple[float, tuple[str, ...]]:
    """Return the computing time relative to undisturbed computing, and the causes of slowdown."""
    config, planning = windows.config, windows.strategy.planning
    some = devices_of(windows.machine, config.workers)[:_MOST_SAMPLED]
    shared = [one for one in outline.spans if one.kind is Kind.SEND and one.worker is None]
    shares = [_concurrent(outline, device, shared) for device in some]
    hidden, copied = (sum(each) / len(shares) for each in zip(*shares, strict=True))
    num_waiting = 1 if planning.is_asynchronous else config.workers
    losses, num_steps = windows.machine.usual_losses, planning.steps_per_period(config)
    causes = {
        "during exchanges": losses.slowdown(hidden, 1, copied=copied),
        "because of stragglers": losses.slowdown(0.0, num_waiting, num_steps),
    }
    slowed_by = tuple(cause for cause, times in causes.items() if times > 1)
    return losses.slowdown(hidden, num_waiting, num_steps, copied=copied), slowed_by


def _concurrent(timeline: Timeline, device: Device, shared: Sequence[Span]) -> tuple[float, float]:
    """Return two shares of a device's computing time: during exchanges, and during copies only.

    `shared`: exchanges that belong to no single worker; they count for every device. Sums in
    the host's memory do not count for a GPU.
    """
    engines = {Resource(device.name, lane) for lane in (Lane.D2H, Lane.H2D)}
    tracks = (track for on, track in timeline.tracks.items() if on.owner == device.name)
    own, copies, exchanges = list[Span](), list[Span](), list(shared)
    for one in chain.from_iterable(tracks):
        if one.kind in COMPUTE:
            own.append(one)
        elif not engines.isdisjoint(one.on):
            copies.append(one)
        elif device.kind != DeviceKind.GPU or all(on.lane is not Lane.REDUCE for on in one.on):
            exchanges.append(one)
    computing = union(own)
    whole = length(computing)
    if not whole:
        return 0.0, 0.0
    exchanged = length(intersection(computing, union(exchanges)))
    either = length(intersection(computing, union([*exchanges, *copies])))
    return exchanged / whole, (either - exchanged) / whole


def _inner_periods(timeline: Timeline, num_periods: int) -> Timeline:
    """Return the timeline without its first and last period, which are not typical."""
    updates = [span for span in timeline.spans if span.kind is Kind.STEP]
    last_of_first = {span.worker: span.start_s for span in updates if span.step == 0}
    start_s = min(last_of_first.values())
    end_s = max(span.end_s for span in updates if span.step == num_periods - 2)
    inner = (one for one in timeline.spans if one.start_s >= start_s and one.end_s <= end_s)
    return Timeline(inner, timeline.origin)
