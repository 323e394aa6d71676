"""Time steps of the fastest rank alone and of all ranks together, before training.

The steps train copies of the model, so that training starts from unchanged weights. A step's time
is the slowest rank's; since all ranks compare these same times, they make the same choice.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import NamedTuple

from torch import nn

from paceline.core.turns import HOPELESS, WORTH, is_faster
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
_NUM_SETTLING, _NUM_TIMED = 2, 4  # numbers of untimed warm-up steps and of timed steps
_NUM_SETTLING_ALONE, _NUM_TIMED_ALONE = 1, 3
# Limits of (step time of all ranks together) / (step time of one rank alone). If the exchange that
# is predicted to be fastest has a predicted ratio above `_FAR_PREDICTED`, none is tried. If its
# measured ratio is above `_FAR`, others are tried only if predicted below `_NEAR_PREDICTED`.
_FAR, _FAR_PREDICTED, _NEAR_PREDICTED = 1.3, 2.0, 1.2
# Timing ends early if one of the two (alone or together) is faster by the fraction `_VERY_CLEAR`
# after two steps, or by the fraction `WORTH` after four. The rank alone has a second turn unless
# the difference is at least the fraction `_CLEAR`.
_CLEAR, _VERY_CLEAR = 0.1, 0.25
# Steps of all ranks are timed once more if they were predicted to take less than this fraction of
# the time alone, but took 1 to `_FAR` times as long: another program may have slowed them.
_CONTRADICTED = 0.95
_LONGEST_WAIT_S = 0.5
Step = Callable[[], object]
Replicate = Callable[[nn.Module], ModelReplica]


class Comparison(NamedTuple):
    """Step times of one rank alone and of all ranks together, for the same number of samples.

    `together_s`: median time of all ranks' steps, by the name of the exchange that averages their
    gradients. `is_alone_faster`: whether one rank alone is faster than every entry of `together_s`.
    `is_predicted`: whether `together_s` has only a prediction for the first exchange, which was so
    much longer than `alone_s` that no exchange was tried.
    """

    alone_s: float
    together_s: Mapping[str, float]
    is_alone_faster: bool
    is_predicted: bool = False

    @property
    def best_s(self) -> float:
        """The step time of all ranks together with the fastest exchange."""
        return min(self.together_s.values())

    @property
    def slow(self) -> list[str]:
        """Names of the exchanges that are much slower than the fastest exchange."""
        return [name for name, one in self.together_s.items() if one > HOPELESS * self.best_s]


def compare_with_alone(
    setup: TrainingSetup,
    group: Group,
    exchanges: Mapping[str, Replicate],
    parts: Sequence[int],
    lone_rank: int,
    predicted_s: Mapping[str, float],
) -> Comparison:
    """Time steps of `lone_rank` alone and steps of all ranks together; collective.

    `exchanges`: by name of an exchange (a way to average gradients), a factory of replicas that use
    it; the exchange that is predicted to be the fastest must be first. `parts`: number of samples
    of each rank in a step of all ranks; `lone_rank` alone takes their sum. `predicted_s`: predicted
    step time with each exchange. A further exchange is tried only if `lone_rank` alone is
    faster than all ranks with each exchange so far.
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
    if predicted_s[first] > _FAR_PREDICTED * median(alone_s):
        return Comparison(median(alone_s), {first: predicted_s[first]}, True, is_predicted=True)
    seconds = {first: together(first)}
    if not _is_clear(alone_s, seconds[first], _CLEAR):
        alone_s += alone()
    is_close = median(seconds[first]) <= _FAR * median(alone_s)
    for name in others:
        if not _is_faster_than_each(alone_s, seconds):
            break
        if is_close or predicted_s[name] <= _NEAR_PREDICTED * median(alone_s):
            seconds[name] = together(name)
    is_contradicted = predicted_s[first] < _CONTRADICTED * median(alone_s)
    if is_close and is_contradicted and _is_faster_than_each(alone_s, seconds):
        seconds[first] = min(seconds[first], together(first), key=median)
    together_s = {name: median(steps) for name, steps in seconds.items()}
    return Comparison(median(alone_s), together_s, _is_faster_than_each(alone_s, seconds))


def _is_faster_than_each(alone_s: Sequence[float], seconds: Mapping[str, Sequence[float]]) -> bool:
    # If times are equal, train on all ranks, because ranks excluded now can never join again.
    return all(is_faster(alone_s, steps) for steps in seconds.values())


def _is_clear(alone_s: Sequence[float], together_s: Sequence[float], difference: float) -> bool:
    pairs = (alone_s, together_s), (together_s, alone_s)
    return any(is_faster(one, other, difference) for one, other in pairs)


def _steps_alone(step: Step, group: Group) -> list[float]:
    seconds = _steps(step, group, 1)
    while (left := _NUM_SETTLING_ALONE + _NUM_TIMED_ALONE - len(seconds)) > 0:
        # All ranks synchronize after each call of `_steps`, which delays the next step. To
        # synchronize rarely, one call takes several short steps, for at most `_LONGEST_WAIT_S`.
        most = max(1, int(_LONGEST_WAIT_S / seconds[-1]))
        seconds += _steps(step, group, min(left, most))
    return seconds[_NUM_SETTLING_ALONE:]


def _steps_together(step: Step, group: Group, alone_s: Sequence[float]) -> list[float]:
    """Time 2, 4 or 8 steps (more if times are close to `alone_s`); return seconds."""
    _steps(step, group, _NUM_SETTLING)
    seconds = _steps(step, group, _NUM_TIMED // 2)
    if not _is_clear(alone_s, seconds, _VERY_CLEAR):
        seconds += _steps(step, group, _NUM_TIMED // 2)
    if not _is_clear(alone_s, seconds, WORTH):
        seconds += _steps(step, group, _NUM_TIMED)
    return seconds


def _steps(step: Step, group: Group, num_steps: int) -> list[float]:
    """Take `num_steps` steps; return the slowest rank's seconds of each step; collective."""
    [own] = timed([step], clock_for(group.device), num_steps)
    return group.largest(own)


@contextmanager
def stepping(
    setup: TrainingSetup,
    group: Group,
    num_samples: int,
    weight: float,
    replicate: Replicate | None,
) -> Iterator[Step]:
    """Yield a function that takes a training step of a copy of the model.

    All steps use one batch, of `num_samples` samples on this rank. `weight`: factor of this rank's
    mean loss. `replicate` wraps the model so that ranks average gradients. If `replicate` is None,
    a rank with samples trains alone, and on a rank without samples the function does nothing.
    """
    if replicate is None and not num_samples:
        yield lambda: None
        return
    model = copy.deepcopy(setup.model).train()
    assert setup.first is not None  # None only for emulated layers, which do not compute
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
