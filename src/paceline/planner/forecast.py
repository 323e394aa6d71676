"""Forecasts: the predicted seconds of a strategy's step on a machine, and the advice they give."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

from paceline.core.after_backward import AfterBackward, BackwardPhase
from paceline.core.compare import Breakdown, breakdown
from paceline.core.cost import CostModel, Roofline, Slowed, compute_lane
from paceline.core.machine import Device, Machine
from paceline.core.plan import COMMUNICATION, COMPUTE, Kind, Lane, Plan
from paceline.core.simulate import makespan_s, simulate
from paceline.core.strategy import Strategy, Window, codec_fields
from paceline.core.timeline import Timeline, intersection, length, union
from paceline.core.workload import Workload, replica_nbytes
from paceline.planner.ranges import half_width
from paceline.strategies import EXCHANGES

_WINDOW = 8  # steps: enough for the first, which starts cold, to drop out of the period
_SHORT_WINDOW = 2  # for plans so wide that their steps hardly depend on the one before
_FEWEST_PERIODS = 3  # the first, the last, and one between them
_MOST_LOOKED_AT = 8  # devices: others are like them
_MANY_TASKS = 8_000  # of a step
_WORTH = 0.95  # of the step without: predictions are hardly better, and codecs round
_ALL = 0.99  # of a step
_SHOWN_SLOWDOWN = 1.005
_GAIN = 1.02  # what more workers have to gain to be worth using
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
    takes than undisturbed (see `core.losses`). `after_backward`: what the exchange leaves to be
    done then, where the strategy says so.
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
    after_backward: AfterBackward | None = None

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
        """How far a measured step may be from `step_s` in nine of ten cases, as a share of it."""
        return half_width(self.machine, self.breakdown)

    @property
    def range_s(self) -> tuple[float, float]:
        """The seconds between which a measured step lies in nine of ten cases."""
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
            computing += (
                f", {100 * (self.slowdown - 1):.0f} % longer than undisturbed: beside exchanges, "
                "and waiting for the slowest"
            )
        if not parts.communication_s:
            return f"{computing}; nothing is exchanged"
        return (
            f"{computing}; {parts.exposed_s * share:.0f} % is communication that shows, "
            f"of {parts.communication_s * 1e3:.3g} ms"
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
    is_balanced = balanced and strategy.plan_balanced is not None
    planned = (is_balanced and strategy.plan_balanced) or strategy.plan

    def window(num_steps: int) -> Plan:
        return planned(workload, machine, config, Window(num_steps))

    per_period = strategy.steps_per_period(config)
    num_steps = _window_steps(len(window(1)), per_period, strategy.repeats_after(config))
    plan = window(num_steps)
    timeline = simulate(plan, model)
    if (slowdown := _slowdown(timeline, machine, strategy, config)) != 1.0:
        model = Slowed(model, slowdown)
        timeline = simulate(plan, model)
    # The difference of two windows: the first step starts cold, the last one overlaps with none.
    period_s = (makespan_s(window(2 * num_steps), model) - timeline.makespan_s) / num_steps
    left = None
    if strategy.after_backward is not None and config.workers > 1:
        left = strategy.after_backward(BackwardPhase(plan, model, timeline))
    num_taken = num_steps * per_period
    step_s, notes = _fed(machine, config.workers, samples_per_step, period_s / per_period)
    parts, per_update = breakdown(timeline), 1.0
    if per_period > 1:
        per_update = num_taken / timeline.num_steps()
        parts = breakdown(_inner_periods(timeline, num_steps)).divided(per_update)
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
        notes=(*notes, *_notes_of(strategy, machine, config, timeline)),
        steps_per_update=per_update,
        slowdown=slowdown,
        after_backward=left,
    )


def _window_steps(num_tasks: int, per_period: int, alike: int) -> int:
    """Return the steps of a window, of which each has so many tasks, in whole periods."""
    num_steps = _SHORT_WINDOW if num_tasks > _MANY_TASKS else _WINDOW
    if per_period > 1:
        num_steps = max(num_steps, _FEWEST_PERIODS)
    return -(-num_steps // alike) * alike


def _notes_of(
    strategy: Strategy, machine: Machine, config: Any, timeline: Timeline
) -> Iterator[str]:
    """Yield what the strategy says beside its forecast: what limits it, what is learnt."""
    if strategy.limit is not None and (limit := strategy.limit(machine, config, timeline)):
        yield limit
    if strategy.caveat is not None:
        yield strategy.caveat(config)


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


def _slowdown(timeline: Timeline, machine: Machine, strategy: Strategy, config: Any) -> float:
    """Return by how much longer computation takes than in a timeline without losses."""
    some = _devices_of(machine, config.workers)[:_MOST_LOOKED_AT]
    shares = [_beside(timeline, device) for device in some]
    hidden = sum(shares) / len(shares)
    num_waiting = 1 if strategy.is_asynchronous else config.workers
    return machine.usual_losses.slowdown(hidden, num_waiting, strategy.steps_per_period(config))


def _beside(timeline: Timeline, device: Device) -> float:
    """Return the exchange beside a device's computation, as a share of that.

    What its host exchanges for it counts, too: the same cores, memory and bus carry the bytes.
    """
    lane = compute_lane(device.name)
    computing = union(one for one in timeline.tracks.get(lane, ()) if one.kind in COMPUTE)
    exchanging = union(
        one
        for one in timeline.spans
        if (one.kind is Kind.SEND and one.worker is None)
        or (one.kind in COMMUNICATION and any(on.owner == device.name for on in one.on))
    )
    whole = length(computing)
    return length(intersection(computing, exchanging)) / whole if whole else 0.0


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


def rank(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Return the forecasts by throughput, best first."""
    return sorted(forecasts, key=lambda forecast: -forecast.samples_per_s)


def memory(
    workload: Workload, machine: Machine, strategy: Strategy, config: Any
) -> Mapping[str, int]:
    """Return the bytes that each device needs, and each host that holds anything, by name."""
    if strategy.memory is not None:
        return strategy.memory(workload, machine, config)
    devices = machine.first_devices(config.workers)
    return {device.name: replica_nbytes(workload) for device in devices}


@dataclass(frozen=True)
class Advice:
    """The advice about codecs: the best forecast without one, and the best with one.

    `beside` is the best without one on as many workers as the one with it.
    """

    plain: Forecast
    encoded: Forecast
    beside: Forecast

    @property
    def pays(self) -> bool:
        """True if a step is faster whatever the predictions err: worth the codec's rounding."""
        return self.encoded.surely_faster_than(self.plain)

    @property
    def may_pay(self) -> bool:
        """True if a step is predicted to be faster, by less than predictions err."""
        return not self.pays and self.encoded.step_s < _WORTH * self.plain.step_s

    @property
    def speedup(self) -> float:
        """The speed-up of a step by the codec."""
        return self.plain.step_s / self.encoded.step_s

    @property
    def sentence(self) -> str:
        """The advice as a sentence, with its reason."""
        plain, encoded = self.plain, self.encoded
        times = f"({_seconds(encoded.step_s)} for {_seconds(plain.step_s)})"
        if self.may_pay:
            return (
                f"a codec may pay: {_named(encoded)} is predicted to be {_compared(self.speedup)} "
                f"{times}, by less than predictions may err: measure both"
            )
        if not self.pays:
            would = f"{_named(encoded)} would be {_compared(self.speedup)} {times}"
            return f"no codec pays: {self._why_not()}; {would}"
        faster = f"{_named(encoded)} is {_compared(self.speedup)} than"
        alike = (plain.strategy, plain.workers) == (encoded.strategy, encoded.workers)
        without = "without" if alike else f"{_named(plain)} without"
        return (
            f"a codec pays: {faster} {without} {times}; the link is busy "
            f"{100 * self.beside.link_busy:.0f} % of a plain step; codecs round gradients: "
            "compare the accuracy, too"
        )

    def _why_not(self) -> str:
        if self.plain.workers == 1:
            return "one worker alone is faster, and exchanges nothing"
        if not self.plain.link_busy:
            return f"{self.plain.strategy} sends nothing over a link"
        if self.plain.breakdown.compute_s > _ALL * self.plain.step_s:
            return "the exchange hides behind backward"
        if self.speedup > 1:
            return "it saves less than predictions may err"
        return "encoding takes longer than it saves"


def _named(forecast: Forecast) -> str:
    codec = f" with {forecast.codec}" if forecast.codec else ""
    workers = f"{forecast.workers} worker{'s' * (forecast.workers > 1)}"
    return f"{forecast.strategy}{codec} on {workers}"


def _compared(speedup: float) -> str:
    factor = f"{max(speedup, 1 / speedup):.2f}"
    if factor == "1.00":
        return "as fast"
    return f"{factor}x {'faster' if speedup > 1 else 'slower'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A strategy that cannot be used on so many workers, and why."""

    strategy: str
    workers: int
    placement: str
    why: str


@dataclass(frozen=True)
class Ranking(Sequence[Forecast]):
    """Forecasts, best first, and what was refused.

    `alone` is the best forecast of one worker, where only another number was asked for.
    """

    forecasts: tuple[Forecast, ...]
    refused: tuple[Refusal, ...]
    batch_size: int
    alone: Forecast | None = None

    def __len__(self) -> int:
        return len(self.forecasts)

    @overload
    def __getitem__(self, index: int) -> Forecast: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Forecast]: ...
    def __getitem__(self, index: int | slice) -> Forecast | Sequence[Forecast]:
        return self.forecasts[index]

    @cached_property
    def advice(self) -> Advice | None:
        """The advice about codecs of gradients, where whole replicas exchange them, or None."""
        replicas = [one for one in self.forecasts if one.strategy in EXCHANGES]
        plain = [one for one in replicas if one.codec is None]
        encoded = next((one for one in replicas if one.codec is not None), None)
        if encoded is None:
            return None
        beside = next(one for one in plain if one.workers == encoded.workers)
        return Advice(plain[0], encoded, beside)

    @cached_property
    def best_of(self) -> dict[int, Forecast]:
        """The best forecast for each number of workers, by that number."""
        best: dict[int, Forecast] = {}
        for forecast in self.forecasts:
            best.setdefault(forecast.workers, forecast)
        return dict(sorted(best.items()))

    @property
    def worth(self) -> int | None:
        """The fewest workers beyond which more hardly gain, or lose.

        None if nothing could be planned, or if only one number was looked at of those that may be.
        """
        if not self._is_comparison:
            return None
        most = self.forecasts[0].samples_per_s
        return next(
            workers
            for workers, forecast in self.best_of.items()
            if forecast.samples_per_s * _GAIN >= most
        )

    @property
    def _is_comparison(self) -> bool:
        """True if numbers of workers were compared, or one worker is all that there is."""
        return len(self.best_of) > 1 or set(self.best_of) == {1}

    @property
    def workers_sentence(self) -> str | None:
        """A sentence about the number of workers worth using, and the effect of more.

        Of a single number that was asked for it says how fast they are beside one worker, and None
        if that is not known: others may be faster than both.
        """
        worth, best = self.worth, self.best_of
        if worth is None:
            return self._beside_one()
        one = best.get(1)
        gain = ""
        if one is not None and worth > 1:
            gain = f", {best[worth].samples_per_s / one.samples_per_s:.2f}x one worker"
        plural = "worker is" if worth == 1 else "workers are"
        if one is not None and worth > 1 and not best[worth].surely_faster_than(one):
            plural = "workers may be"
        sentence = f"{worth} {plural} worth using{gain}"
        more = [workers for workers in best if workers > worth]
        if not more:
            return sentence
        last = best[more[-1]].samples_per_s / best[worth].samples_per_s
        change = f"gain {100 * (last - 1):.0f} %" if last >= 1 else f"lose {100 * (1 - last):.0f} %"
        return f"{sentence}; {more[-1]} would {change}"

    def _beside_one(self) -> str | None:
        if self.alone is None or not self.forecasts:
            return None
        best = self.forecasts[0]
        times = best.samples_per_s / self.alone.samples_per_s
        beside = f"are {times:.2f}x one worker"
        if times < _GAIN:
            verdict = "slower" if times * _GAIN < 1 else "no faster"
            beside = f"are {verdict} than one ({times:.2f}x)"
        return f"{best.workers} workers {beside}; other numbers of workers were not compared"
