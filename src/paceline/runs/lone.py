"""Decide before a training whether rank 0 alone would be faster than all ranks."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from paceline.core.balance import apportion
from paceline.core.durations import duration
from paceline.core.plan import Kind
from paceline.core.settings import RunSettings, TrainSettings
from paceline.exchange.alone import compare_with_alone
from paceline.exchange.profile import Profile
from paceline.exchange.replicas import ReplicaRunner
from paceline.exchange.session import Runner, TrainingSession
from paceline.planner import Forecast
from paceline.records.settings import AUTO
from paceline.runs.forecasts import worth_trying
from paceline.strategies import EXCHANGES, find_strategy

_HOPELESS = 1.5  # ways predicted or measured to be slower by this factor are not tried
_ALIKE = 1.25  # limit for preferring rank 0: its step time / step time of the fastest rank
logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """Result of a comparison with a rank alone.

    `why_alone`: why rank 0 should train alone; None if it should not. `slow`: exchanges that were
    much slower than another one.
    """

    why_alone: str | None = None
    slow: Sequence[str] = ()


def alone_or_together(
    session: TrainingSession, runner: Runner, forecasts: Sequence[Forecast]
) -> Found:
    """Decide whether rank 0 should train alone.

    Times steps with the whole batch, in turns by the fastest rank alone and by all ranks. All ranks
    must call this together.
    """
    settings, group = session.settings, session.group
    if not isinstance(runner, ReplicaRunner) or session.strategy.name not in EXCHANGES:
        return Found()  # with strategy local, one worker would learn differently
    if group.world_size == 1 or runner.setup.first is None:
        return Found()
    profiled = runner.with_equal_shares
    assert profiled is not None
    seconds = _seconds_of_samples(profiled, settings.batch_size / runner.workload.batch_size)
    if settings.strategy != AUTO:
        forecasts = [one for one in forecasts if one.strategy == session.strategy.name]
    # Rank 0 decides, because profiles differ between ranks.
    lone_rank, names = group.gather(_plausible(seconds, forecasts, group.world_size))[0]
    parts = apportion(
        settings.batch_size,
        [1.0] * group.world_size if settings.balance is None else [1 / one for one in seconds],
    )
    parts = group.gather(parts)[0]
    if not names:
        return Found()
    exchanges, by_name = {}, {one.exchange: one for one in forecasts}
    for name in names:
        replica = find_strategy(by_name[name].strategy).runner().replica
        exchanges[name] = partial(replica, config=by_name[name].config, group=group)
    found = compare_with_alone(runner.setup, group, exchanges, parts, lone_rank)
    if not found.is_alone_faster:
        return Found(slow=found.slow)
    figures = (
        f"worker {lone_rank} alone takes {duration(found.alone_s)} a step, all "
        f"{group.world_size} workers {duration(found.best_s)}"
    )
    if lone_rank == 0:
        return Found(f"{figures}: it continues without the others (--keep-all keeps them)")
    if group.rank == 0:
        logger.warning("%s: start worker 0 on its machine to train without the others", figures)
    return Found(slow=found.slow)


def may_be_alone(settings: RunSettings) -> bool:
    """Whether the settings leave the number of workers to this program."""
    if not isinstance(settings, TrainSettings) or settings.keep_all:
        return False
    return settings.strategy == AUTO or settings.balance is not None


def _plausible(
    seconds: Sequence[float], forecasts: Sequence[Forecast], num_ranks: int
) -> tuple[int, list[str]]:
    """Return the fastest rank, and the exchanges to compare it with: none if it is too slow.

    Ranks of one machine share its cores; a rank that trains alone has all cores.
    """
    fastest, best = min(range(num_ranks), key=seconds.__getitem__), forecasts[0]
    if seconds[0] <= _ALIKE * seconds[fastest]:
        fastest = 0  # prefer rank 0, which has the run's folder
    on_one_machine = len({device.host for device in best.machine.devices[:num_ranks]}) == 1
    alone_s = seconds[fastest] / (num_ranks if on_one_machine else 1)
    limit_s = _HOPELESS * best.step_s
    best_of = dict[str, str]()
    for one in worth_trying(forecasts):
        if alone_s <= limit_s and one.step_s <= limit_s:
            best_of.setdefault(one.strategy, one.exchange)  # forecasts are sorted
    return fastest, list(best_of.values())


def _seconds_of_samples(profiled: Profile, factor: float) -> list[float]:
    """Return each rank's seconds for a step with `factor` times the rank's profiled samples."""
    own_s = {device.name: 0.0 for device in profiled.machine.devices}
    for key, seconds in profiled.durations.items():
        if key.kind in (Kind.FORWARD, Kind.BACKWARD):
            own_s[key.owner] += factor * seconds
        elif key.kind is Kind.STEP:
            own_s[key.owner] += seconds
    return list(own_s.values())
