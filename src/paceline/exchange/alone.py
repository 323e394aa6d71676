"""Before training, compare the step times of the fastest rank alone and of all ranks.

The steps train copies of the model, so that the training itself starts from unchanged weights. All
ranks make the same choice, because the slowest rank's time counts as the time of a step.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import nn

from paceline.core.turns import HOPELESS, Turns
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
_FAR = 1.5  # further exchanges are not tried if the first is slower than a rank alone by this
_LONGEST_WAIT_S = 0.5
Step = Callable[[], object]
Replicate = Callable[[nn.Module], ModelReplica]


class Comparison(NamedTuple):
    """Median step times for the same samples: one rank alone, and all ranks with each exchange.

    `is_alone_faster`: whether the rank alone is faster than all ranks with each exchange.
    """

    alone_s: float
    together_s: Mapping[str, float]
    is_alone_faster: bool

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
) -> Comparison:
    """Compare steps of `lone_rank` alone with steps of all ranks; collective.

    `exchanges`: factories of replicas, the exchange predicted to be fastest first. The others are
    tried as long as the rank alone is faster, because the prediction may be wrong. `parts`: number
    of samples of each rank in a step of all ranks.
    """
    first, *others = exchanges
    # a tie goes to all ranks, because a rank that leaves does not return
    turns = Turns((first, ALONE), num_rounds=2, num_settling=2, num_timed=4)
    whole = [sum(parts) if rank == lone_rank else 0 for rank in range(group.world_size)]
    weight = parts[group.rank] * group.world_size / sum(parts)

    def take_turns() -> None:
        while not turns.settled:
            if turns.name == ALONE:
                made = stepping(setup, group, whole[group.rank], 1.0, None)
            else:
                made = stepping(setup, group, parts[group.rank], weight, exchanges[turns.name])
            with made as step:
                turns.add(_timed(step, turns.num_settling, turns.num_timed, group))

    take_turns()
    for name in others:
        found = turns.seconds
        if turns.name != ALONE or found[first] > _FAR * found[ALONE]:
            break
        turns.also(name)
        take_turns()
    together_s = turns.seconds
    return Comparison(together_s.pop(ALONE), together_s, turns.name == ALONE)


def _timed(step: Step, num_settling: int, num_timed: int, group: Group) -> list[float]:
    """Take steps, and return the seconds of the timed steps on the slowest rank; collective."""
    clock, seconds = clock_for(group.device), list[float]()
    num_steps, num_left = 1, num_settling + num_timed
    while num_left:
        [own] = timed([step], clock, num_steps)
        slowest = [max(of_ranks) for of_ranks in zip(*group.gather(own), strict=True)]
        seconds += slowest
        num_left -= num_steps
        # A rank without steps waits for the others: for one step, or for several short steps,
        # because each wait delays the next step.
        num_steps = min(num_left, max(1, int(_LONGEST_WAIT_S / slowest[-1])))
    return seconds[-num_timed:]


@contextmanager
def stepping(
    setup: TrainingSetup,
    group: Group,
    num_samples: int,
    weight: float,
    replicate: Replicate | None,
) -> Iterator[Step]:
    """Yield a function that takes a step of a copy of the model.

    `weight`: factor of this rank's mean loss. Without `replicate`, a rank with samples trains
    alone, and other ranks do nothing.
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
