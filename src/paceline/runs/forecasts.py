"""Profile strategies on this machine, forecast their step times, and choose the fastest.

`alone_or_together` also decides whether rank 0 alone would train faster than all ranks.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from paceline.core.balance import apportion
from paceline.core.durations import duration
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Outcome
from paceline.core.settings import RunSettings, TrainSettings
from paceline.core.strategy import Strategy, gradient_codec
from paceline.core.turns import HOPELESS
from paceline.core.wire_format import AUTO as CODEC_AUTO
from paceline.core.wire_format import wire_format
from paceline.exchange.alone import Comparison, compare_with_alone
from paceline.exchange.loop import traced_steps
from paceline.exchange.replica import Method
from paceline.exchange.replicas import ReplicaRunner
from paceline.exchange.session import Runner, TrainingSession
from paceline.exchange.setup import NUM_WARM_UP
from paceline.exchange.trials import Trials
from paceline.exchange.trying import Trying
from paceline.links.clock import clock_for
from paceline.links.cores import all_cores
from paceline.links.group import Group
from paceline.planner import Forecast, Ranking, Refusal, forecast, rank
from paceline.planner.grouping import with_best_chunk
from paceline.records.settings import AUTO
from paceline.strategies import EXCHANGES, IN_STEP, find_strategy

_UNTRIED = 1.5  # exchanges predicted to be slower than the best by this factor are not tried
# The same limit for one rank alone. It is above 2, so that one of two equal ranks is always tried
# alone: it takes at most twice as long as both together.
_UNTRIED_ALONE = 2.5
_LEAST_GAIN = 0.01  # codecs predicted to shorten a step by less are not tried
_ALIKE = 1.6  # prefer rank 0 to the fastest rank if it takes at most this many times as long
logger = logging.getLogger(__name__)


def forecasts_of(session: TrainingSession, runner: Runner) -> list[Forecast]:
    """Profile and forecast the session's strategy; return the forecasts, best first.

    If the strategy exchanges gradients of whole models, the other strategies that do so are
    profiled alternately with it, and forecast, too. The list is empty if the runner cannot profile.
    """
    strategy, config = session.strategy, session.config
    if not isinstance(runner, ReplicaRunner):
        calibrated = runner.measure()
        if calibrated is None:
            return []
        machine, cost = calibrated
        # hogbatch's `measure` removes lost workers, and workers that do not help (`admit`).
        config = replace(config, workers=min(config.workers, machine.num_devices))
        planned = (runner.workload, machine, strategy, config, runner.samples_per_step, cost)
        return [forecast(*planned, balanced=session.settings.balance is not None)]
    configured = [(strategy, config)]
    if not session.is_rehearsal or session.settings.strategy == AUTO:
        others = [one for name, one in EXCHANGES.items() if name != strategy.name]
        configured += [(one, one.config(workers=session.group.world_size)) for one in others]
    if session.settings.strategy == AUTO and session.settings.codec == CODEC_AUTO:
        how = {"workers": session.group.world_size, "codec": wire_format(CODEC_AUTO).name}
        coded = [one for one in EXCHANGES.values() if "codec" in one.options.settings]
        configured += [(one, one.config(**how)) for one in coded]
    runner.profile(configured)
    return rank([forecast_with(session, runner, *each) for each in configured])


def forecast_with(
    session: TrainingSession, runner: ReplicaRunner, strategy: Strategy, config: Any
) -> Forecast:
    """Forecast a profiled strategy, with the best `chunk` (layers per exchange) if none is set."""
    machine, cost = runner.calibrated(strategy, config)
    settings = session.settings
    is_asked = "chunk" in settings.options or (settings.strategy != AUTO and session.is_rehearsal)
    if hasattr(config, "chunk") and not is_asked:
        config = with_best_chunk(runner.workload, machine, strategy, config, cost)
    return forecast(runner.workload, machine, strategy, config, runner.samples_per_step, cost)


def ranking_of(session: TrainingSession, runner: Runner, forecasts: Sequence[Forecast]) -> Ranking:
    """Rank `forecasts` together with new forecasts of all other synchronous strategies.

    A strategy that cannot be profiled is listed as refused. Each strategy is profiled
    twice, and its faster forecast counts, in case other programs slowed one of the profiles.
    Finally rank 0 profiles a single worker that uses the whole machine; only rank 0's ranking
    contains this worker. All ranks must call this together.
    """
    if session.strategy.is_led:  # a hub or coordinator cannot profile synchronous ranks
        return Ranking(tuple(forecasts), ())
    placement, refusals = forecasts[0].placement, list[Refusal]()
    with ExitStack() as stack:
        others = list[tuple[TrainingSession, Runner]]()
        measured = [list(forecasts)]
        for name, strategy in IN_STEP.items():
            if any(one.strategy == name for one in forecasts):
                continue
            other = _with_strategy(session, strategy)
            try:
                each = other, stack.enter_context(strategy.runner().start(other))
                measured.append(_measured(*each))
                others.append(each)
            except InvalidInput as error:
                refusals.append(Refusal(name, session.group.world_size, placement, str(error)))
        if len(measured) > 1:
            measured += [_measured(*each) for each in ((session, runner), *others)]
    found = dict[str, Forecast]()
    for one in rank(chain.from_iterable(measured)):
        found.setdefault(one.strategy, one)
    best = list(found.values())
    if session.group.rank == 0 and session.group.world_size > 1:
        try:
            best.append(_of_one_worker(session))
        except InvalidInput as error:
            refusals.append(Refusal(best[0].strategy, 1, placement, str(error)))
    return Ranking(tuple(rank(best)), tuple(refusals))


def _with_strategy(session: TrainingSession, strategy: Strategy) -> TrainingSession:
    """Return the session with the default configuration of another strategy."""
    known: dict[str, Any] = {"strategy": strategy.name, "options": {}, "balance": None}
    settings = session.settings.model_copy(update=known)
    config = strategy.config(workers=session.group.world_size)
    return replace(session, settings=settings, strategy=strategy, config=config)


def _measured(session: TrainingSession, runner: Runner) -> list[Forecast]:
    logger.info("%s: profiling for %g s", session.strategy.name, session.settings.profile_s)
    return forecasts_of(session, runner)


def _of_one_worker(session: TrainingSession) -> Forecast:
    """Profile one worker with the whole batch in this process, using all cores.

    The other ranks have finished profiling, so the machine is free.
    """
    strategy = next(iter(EXCHANGES.values()))  # any strategy: one worker exchanges nothing
    alone = Group.alone(session.group.device, session.group.deadline_s)
    settings = session.settings.model_copy(update={"workers": 1})
    session = _with_strategy(replace(session, group=alone, settings=settings), strategy)
    logger.info("one worker: profiling for %g s", settings.profile_s)
    with all_cores(), strategy.runner().start(session) as runner:
        assert isinstance(runner, ReplicaRunner)
        runner.profile([(strategy, session.config)])
        return forecast_with(session, runner, strategy, session.config)


class Candidates(NamedTuple):
    """The exchanges that may be fastest: `Method`s by name, the simplest first.

    `unlikely`: the names of those that are predicted to be much slower than the best.
    """

    methods: Mapping[str, Method]
    unlikely: Sequence[str]


def candidates_of(
    group: Group, forecasts: Sequence[Forecast], decide: Callable[[str], None]
) -> Candidates:
    """Select the exchanges to try; pass `decide` a text that lists their predicted step times."""
    # Profiles differ between ranks, so rank 0 decides for all.
    predicted = group.gather({one.exchange: one.step_s for one in worth_trying(forecasts)})[0]
    by_name = {one.exchange: one for one in forecasts if one.exchange in predicted}
    best_s = min(predicted.values())

    def simplicity(name: str) -> tuple[bool, int]:
        found = by_name[name]
        return gradient_codec(found.config) is not None, [*EXCHANGES].index(found.strategy)

    # Torch's own all-reduce is always tried, and comes first, because a tie selects the earlier
    # exchange. Exchanges with codecs come last.
    simplest, *others = sorted(by_name, key=simplicity)
    names = [simplest, *(name for name in others if predicted[name] <= _UNTRIED * best_s)]
    if group.world_size == 1:
        names = names[:1]  # nothing is exchanged
    else:
        shown = [f"{name} {duration(step_s)}" for name, step_s in predicted.items()]
        decide(f"auto: trying {', '.join(names)}; predicted {', '.join(shown)} a step")
    chosen = {name: by_name[name] for name in names}
    methods = {
        name: find_strategy(one.strategy).runner().method(one.config)
        for name, one in chosen.items()
    }
    return Candidates(methods, [name for name in names if predicted[name] > HOPELESS * best_s])


def worth_trying(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Drop forecasts whose codec would save under 1 % of a step; return the others."""
    plain_s = {one.strategy: one.step_s for one in forecasts if gradient_codec(one.config) is None}
    return [
        one
        for one in forecasts
        if gradient_codec(one.config) is None
        or one.step_s < (1 - _LEAST_GAIN) * plain_s.get(one.strategy, inf)
    ]


def train_best(
    session: TrainingSession,
    runner: ReplicaRunner,
    forecasts: Sequence[Forecast],
    slow: Collection[str],
) -> tuple[Forecast, Outcome]:
    """Train with all candidate exchanges, then with the fastest one, and log each choice.

    Exchanges predicted to be much slower than the fastest are not tried, except torch's own
    all-reduce. The exchanges in `slow` are tried only if step times change later. Returns the
    forecast of the last used exchange, and the outcome.
    """
    group, decisions = session.group, list[str]()

    def decide(why: str) -> None:
        decisions.append(why)
        logger.info("%s", why)

    by_name = {one.exchange: one for one in forecasts}
    candidates, unlikely = candidates_of(group, forecasts, decide)
    steps = runner.setup.epoch_steps
    traced = traced_steps(steps)
    # the reducer that is used last needs a few steps of warm-up before the trace
    last_step = max(0, sum(steps[: traced.epoch]) + traced.step - NUM_WARM_UP)
    sampler = runner.setup.sampler
    trials = Trials(
        candidates,
        clock_for(group.device),
        slow,
        unlikely,
        last_step,
        decide,
        shares=lambda: () if sampler is None else sampler.shares,
    )

    def used() -> tuple[Strategy, Any]:
        found = by_name[trials.name]
        return find_strategy(found.strategy), found.config

    tried: dict[str, Any] = {"group": group, "gradient_as_bucket_view": True}
    outcome = runner.train_with(lambda one: Trying(one, candidates, trials, **tried), used)
    chosen = by_name[trials.name]
    seconds, timed_s = outcome.step_seconds, trials.seconds.get(trials.name)
    steady = seconds[trials.num_searched :] or ((timed_s,) if timed_s else seconds[-1:])
    known = {"step_seconds": steady, "decisions": tuple(decisions), "config": chosen.config}
    return chosen, outcome.model_copy(update=known)


class Found(NamedTuple):
    """Whether rank 0 should train alone, and the exchanges that are too slow to try.

    `why_alone`: the reason; None if all ranks should train together. `slow`: exchanges that
    took much longer than the fastest exchange.
    """

    why_alone: str | None = None
    slow: Sequence[str] = ()


def alone_or_together(
    session: TrainingSession, runner: Runner, forecasts: Sequence[Forecast]
) -> Found:
    """Decide whether rank 0 should train alone; all ranks must call this together.

    Times a few steps with the whole batch, alternately on the fastest rank alone and on all ranks.
    """
    settings, group = session.settings, session.group
    if not isinstance(runner, ReplicaRunner) or session.strategy.name not in EXCHANGES:
        return Found()  # strategy `local`, for example, trains differently with one worker
    if group.world_size == 1 or runner.setup.first is None:
        return Found()
    if settings.strategy != AUTO:
        forecasts = [one for one in forecasts if one.strategy == session.strategy.name]
    # Rank 0 decides, because profiles differ between ranks.
    own = _plausible(runner.rank_seconds(), forecasts, group.world_size)
    fastest, predicted = group.gather(own)[0]
    if not predicted:
        return Found()
    sampler = runner.setup.sampler
    equal = apportion(settings.batch_size, [1.0] * group.world_size)
    parts = equal if sampler is None else sampler.shares
    exchanges, by_name = {}, {one.exchange: one for one in forecasts}
    for name in predicted:
        replica = find_strategy(by_name[name].strategy).runner().replica
        exchanges[name] = partial(replica, config=by_name[name].config, group=group)
    compared = compare_with_alone(runner.setup, group, exchanges, parts, fastest, predicted)
    return _decision(compared, fastest, group)


def _decision(compared: Comparison, fastest: int, group: Group) -> Found:
    """Choose rank 0 alone if that is faster; if another rank alone is faster, log a warning."""
    if not compared.is_alone_faster:
        return Found(slow=compared.slow)
    figures = (
        f"worker {fastest} alone takes {duration(compared.alone_s)} a step, all "
        f"{group.world_size} workers {duration(compared.best_s)}"
        f"{' (predicted)' if compared.is_predicted else ''}"
    )
    if fastest == 0:
        return Found(f"{figures}: worker 0 trains alone (--keep-all keeps all workers)")
    if group.rank == 0:
        logger.warning("%s: to train there alone, start worker 0 on that machine", figures)
    return Found(slow=compared.slow)


def may_be_alone(settings: RunSettings) -> bool:
    """Return whether the settings allow training with fewer workers than requested."""
    if not isinstance(settings, TrainSettings) or settings.keep_all:
        return False
    return settings.strategy == AUTO or settings.balance is not None


def _plausible(
    seconds: Sequence[float], forecasts: Sequence[Forecast], num_ranks: int
) -> tuple[int, dict[str, float]]:
    """Return the rank to try alone, and the exchanges to compare it with.

    The exchanges are a dict from names to predicted step times. The dict is empty if the rank alone
    is predicted to be too slow. `seconds`: for each rank, the computing time of a step with the
    whole batch. Ranks of one machine share its cores; a rank that trains alone gets all cores.
    """
    fastest, best = min(range(num_ranks), key=seconds.__getitem__), forecasts[0]
    if seconds[0] <= _ALIKE * seconds[fastest]:
        fastest = 0  # prefer rank 0, which has the run's folder
    on_one_machine = len({device.host for device in best.machine.devices[:num_ranks]}) == 1
    alone_s = seconds[fastest] / (num_ranks if on_one_machine else 1)
    best_of = dict[str, Forecast]()
    for one in worth_trying(forecasts):
        if alone_s <= _UNTRIED_ALONE * best.step_s and one.step_s <= _UNTRIED * best.step_s:
            best_of.setdefault(one.strategy, one)  # the first forecast of a strategy is its best
    return fastest, {one.exchange: one.step_s for one in best_of.values()}
