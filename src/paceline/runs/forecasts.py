"""Forecasts for this machine, from what a runner measures on it, and the choice among them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Outcome
from paceline.core.strategy import Strategy
from paceline.exchange.loop import traced_steps
from paceline.exchange.replica import ModelReplica
from paceline.exchange.replicas import ReplicaRunner
from paceline.exchange.session import Runner, TrainingSession
from paceline.exchange.trials import Candidate, Checked
from paceline.planner import ERROR_BAR, Forecast, Ranking, Refusal, forecast, rank
from paceline.planner.search import with_best_chunk
from paceline.record.clock import clock_for
from paceline.strategies import EXCHANGES, IN_STEP, find_strategy

_TOLERANCE = 2 * ERROR_BAR
logger = logging.getLogger(__name__)


def forecasts_of(session: TrainingSession, runner: Runner) -> list[Forecast]:
    """Measure, and return the forecast of the session's strategy, and of all that are alike.

    Strategies of replicas are measured side by side, as training has them shown; best first. The
    list is empty if nothing was to be measured.
    """
    strategy, config = session.strategy, session.config
    if not isinstance(runner, ReplicaRunner):
        calibrated = runner.measure()
        if calibrated is None:
            return []
        machine, cost = calibrated
        planned = (runner.workload, machine, strategy, config, runner.samples_per_step, cost)
        return [forecast(*planned, balanced=session.settings.balance is not None)]
    configured = [(strategy, config)]
    if not session.is_rehearsal:
        others = [one for name, one in EXCHANGES.items() if name != strategy.name]
        configured += [(one, one.config(workers=session.group.world_size)) for one in others]
    runner.profile(configured)
    return rank([forecast_with(session, runner, *each) for each in configured])


def forecast_with(
    session: TrainingSession, runner: ReplicaRunner, strategy: Strategy, config: Any
) -> Forecast:
    """Return the forecast of a strategy that was profiled, with the best chunk if none is given."""
    machine, cost = runner.calibrated(strategy, config)
    settings = session.settings
    if hasattr(config, "chunk") and "chunk" not in settings.options and not session.is_rehearsal:
        config = with_best_chunk(runner.workload, machine, strategy, config, cost)
    return forecast(runner.workload, machine, strategy, config, runner.samples_per_step, cost)


def ranking_of(session: TrainingSession, forecasts: Sequence[Forecast]) -> Ranking:
    """Return the forecasts and those of the other strategies in step, best first, or why not.

    Their parts of a step are not those of a whole model, and are measured by themselves, of a model
    of their own. All ranks must call it together.
    """
    found, refusals = list(forecasts), []
    settings = session.settings
    if session.strategy.is_led:  # alone in its group, where no ranks in step can be measured
        return Ranking(tuple(found), (), settings.batch_size)
    for name, strategy in IN_STEP.items():
        if any(one.strategy == name for one in forecasts):
            continue
        asked = settings.model_copy(update={"strategy": name, "options": {}, "balance": None})
        config = strategy.config(workers=session.group.world_size)
        other = replace(session, settings=asked, strategy=strategy, config=config)
        try:
            logger.info("%s: profiling for %g s", name, settings.profile_s)
            with strategy.runner().start(other) as runner:
                found += forecasts_of(other, runner)
        except InvalidInput as error:
            workers = session.group.world_size
            refusals.append(Refusal(name, workers, forecasts[0].placement, str(error)))
    return Ranking(tuple(rank(found)), tuple(refusals), settings.batch_size)


def train_best(
    session: TrainingSession, runner: ReplicaRunner, forecasts: Sequence[Forecast]
) -> tuple[Forecast, Outcome]:
    """Train with the strategy that is predicted to be fastest, or else with the next one.

    The one in use is checked against what its steps take, and every change of mind is logged.
    Return the forecast of the one that was used in the end, and the outcome.
    """
    group, decisions = session.group, list[str]()

    def decide(why: str) -> None:
        decisions.append(why)
        logger.info("%s", why)

    # Profiles differ between ranks, and all have to go the same way: rank 0's.
    predicted = group.gather([(one.strategy, one.step_s) for one in forecasts])[0]
    by_name = {one.strategy: one for one in forecasts}
    shown = [f"{name} {step_s * 1e3:.3g} ms" for name, step_s in predicted]
    decide(f"auto: {predicted[0][0]} first; predicted {', '.join(shown)} a step")
    model = runner.setup.model
    candidates = []
    for name, step_s in predicted:
        make = partial(find_strategy(name).runner().replica, model, by_name[name].config, group)
        candidates.append(Candidate(name, step_s, make))
    steps = runner.setup.epoch_steps
    traced = traced_steps(steps)
    last_step = sum(steps[: traced.epoch]) + traced.step
    accumulates = runner.setup.learning.accumulate > 1
    checked, clock = list[Checked](), clock_for(group.device)

    def replicate(module: nn.Module) -> ModelReplica:
        checked.append(
            Checked(candidates, group, clock, _TOLERANCE, last_step, decide, accumulates)
        )
        return checked[0]

    first = find_strategy(predicted[0][0])
    outcome = runner.train_as(first, by_name[first.name].config, replicate)
    used = by_name[checked[0].name]
    seconds = outcome.step_seconds
    steady = seconds[checked[0].num_searched :] or seconds[-1:]
    known = {"step_seconds": steady, "decisions": tuple(decisions), "config": used.config}
    return used, outcome.model_copy(update=known)
