"""Before training, compare the step times of the fastest rank alone and of all ranks.

The steps train copies of the model, so that the training itself starts from unchanged weights. All
ranks make the same choice, because the slowest rank's time counts as the time of a step.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import NamedTuple

from torch import nn

from paceline.core.turns import HOPELESS, is_faster
from paceline.exchange.layout import check_same
from paceline.exchange.replica import ModelReplica, SingleReplica
from paceline.exchange.setup import TrainingSetup
from paceline.exchange.step import Share, train_step
from paceline.links.clock import clock_for
from paceline.links.cores import all_cores
from paceline.links.group import Group
from paceline.measure.timing import timed
from paceline.record.recorder import Recorder
from paceline.training.models.paced import Stretched

ALONE = "alone"
_NUM_SETTLING, _NUM_TIMED = 2, 4  # the first step constructs an exchange
# Ratios of the step time of all ranks to the step time of a rank alone. If the measured ratio of
# the first exchange is above `_FAR`, no other exchange is tried. If the predicted ratio is above
# `_HOPELESS_PREDICTION`, no exchange is tried.
_FAR, _HOPELESS_PREDICTION = 1.3, 2.0
_CLEAR, _VERY_CLEAR = 0.1, 0.25  # relative differences that end a comparison early
_LONGEST_WAIT_S = 0.5
Step = Callable[[], object]
Replicate = Callable[[nn.Module], ModelReplica]


class Comparison(NamedTuple):
    """Step times for the same samples: one rank alone, and all ranks with each exchange.

    `is_alone_faster`: whether the rank alone is faster than all ranks with each exchange.
    `together_s`: by exchange, the median of measured steps. If even the fastest exchange was
    predicted to be far slower than the rank alone, none is tried: `is_predicted` is true, and
    `together_s` has the prediction.
    """

    alone_s: float
    together_s: Mapping[str, float]
    is_alone_faster: bool
    is_predicted: bool = False

    @property
    def best_s(self) -> float:
        """The step time of all ranks with the fastest exchange."""
        return min(self.together_s.values())

    @property
    def slow(self) -> list[str]:
        """The exchanges that are much slower than the fastest exchange."""
        return [name for name, one in self.together_s.items() if one > HOPELESS * self.best_s]


def compare_with_alone(
    setup: TrainingSetup,
    group: Group,
    exchanges: Mapping[str, Replicate],
    parts: Sequence[int],
    lone_rank: int,
    predicted_s: float,
) -> Comparison:
    """Compare steps of `lone_rank` alone with steps of all ranks; collective.

    `exchanges`: a factory of replicas for each exchange; the first is predicted to be the fastest.
    `predicted_s`: predicted step time with the first exchange. Because predictions may be wrong,
    the other exchanges are tried as long as the rank alone is faster. `parts`: number of samples of
    each rank in a step of all ranks.
    """
    whole = [sum(parts) if rank == lone_rank else 0 for rank in range(group.world_size)]
    weight = parts[group.rank] * group.world_size / sum(parts)

    def alone() -> list[float]:
        with stepping(setup, group, whole[group.rank], 1.0, None) as step:
            return _steps_alone(step, group)

    def together(name: str) -> list[float]:
        with stepping(setup, group, parts[group.rank], weight, exchanges[name]) as step:
            return _steps_together(step, group, alone_s)

    first, *others = exchanges
    alone_s = alone()
    if predicted_s > _HOPELESS_PREDICTION * median(alone_s):
        return Comparison(median(alone_s), {first: predicted_s}, True, is_predicted=True)
    check_same(setup.model, group)  # before the first exchange, which would hang
    seconds = {first: together(first)}
    if not _is_clear(alone_s, seconds[first]):
        alone_s += alone()
    if median(seconds[first]) <= _FAR * median(alone_s):
        for name in others:
            if not _is_faster_than_each(alone_s, seconds):
                break
            seconds[name] = together(name)
    together_s = {name: median(steps) for name, steps in seconds.items()}
    return Comparison(median(alone_s), together_s, _is_faster_than_each(alone_s, seconds))


def _is_faster_than_each(alone_s: Sequence[float], seconds: Mapping[str, Sequence[float]]) -> bool:
    # A tie goes to all ranks, because a rank that leaves does not return.
    return all(is_faster(alone_s, steps) for steps in seconds.values())


def _is_clear(
    alone_s: Sequence[float], together_s: Sequence[float], difference: float = _CLEAR
) -> bool:
    pairs = (alone_s, together_s), (together_s, alone_s)
    return any(is_faster(one, other, difference) for one, other in pairs)


def _steps_alone(step: Step, group: Group) -> list[float]:
    seconds = _steps(step, group, 1)
    while (left := _NUM_SETTLING + _NUM_TIMED - len(seconds)) > 0:
        # The other ranks wait for each group of steps, and each wait delays the next step. So short
        # steps are grouped, up to `_LONGEST_WAIT_S`.
        most = max(1, int(_LONGEST_WAIT_S / seconds[-1]))
        seconds += _steps(step, group, min(left, most))
    return seconds[_NUM_SETTLING:]


def _steps_together(step: Step, group: Group, alone_s: Sequence[float]) -> list[float]:
    """Return the seconds of 2, 4 or 8 steps; the closer to `alone_s`, the more are taken."""
    _steps(step, group, _NUM_SETTLING)
    seconds = _steps(step, group, _NUM_TIMED // 2)
    if not _is_clear(alone_s, seconds, _VERY_CLEAR):
        seconds += _steps(step, group, _NUM_TIMED // 2)
    if not _is_clear(alone_s, seconds):
        seconds += _steps(step, group, _NUM_TIMED)
    return seconds


def _steps(step: Step, group: Group, num_steps: int) -> list[float]:
    """Take steps; return the seconds that the slowest rank took for each step; collective."""
    [own] = timed([step], clock_for(group.device), num_steps)
    return [max(of_ranks) for of_ranks in zip(*group.gather(own), strict=True)]


@contextmanager
def stepping(
    setup: TrainingSetup,
    group: Group,
    num_samples: int,
    weight: float,
    replicate: Replicate | None,
) -> Iterator[Step]:
    """Yield a function that takes a step of a copy of the model.

    `weight`: factor of this rank's mean loss. If `replicate` is None, a rank with samples trains
    alone, and on a rank without samples the function does nothing.
    """
    if replicate is None and not num_samples:
        yield lambda: None
        return
    model = copy.deepcopy(setup.model).train()
    assert setup.first is not None  # None only for paced layers, which are never compared
    with ExitStack() as stack:
        if setup.factor is not None:
            stack.callback(Stretched(model, setup.factor).remove)
        if replicate is None:
            stack.enter_context(all_cores())
            replica: ModelReplica = SingleReplica(model)
        else:
            replica = replicate(model)
            stack.callback(replica.close)
        share = Share(*setup.first(num_samples).to(group.device), weight)
        optimizer = setup.optimizer(model)
        recorder = Recorder(clock_for(group.device), "", group.rank)
        batches = iter(lambda: share, None)
        yield lambda: train_step(replica, optimizer, batches, recorder, setup.learning)
