"""Before training, compare the step times of the fastest rank alone and of all ranks.

The steps train copies of the model, so that the training itself starts from unchanged weights. All
ranks make the same choice, because the slowest rank's time counts as the time of a step.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import nn

from paceline.core.turns import Turns
from paceline.exchange.replica import ModelReplica, SingleReplica
from paceline.exchange.setup import TrainingSetup
from paceline.exchange.step import Share, train_step
from paceline.links.clock import clock_for
from paceline.links.cores import all_cores
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.training.models.paced import Stretched

ALONE, TOGETHER = "alone", "together"
Step = Callable[[], object]


class Comparison(NamedTuple):
    """Median step times of one rank alone and of all ranks together, for the same samples."""

    alone_s: float
    together_s: float
    is_alone_faster: bool


def compare_with_alone(
    setup: TrainingSetup,
    group: Group,
    replicate: Callable[[nn.Module], ModelReplica],
    parts: Sequence[int],
    lone_rank: int,
) -> Comparison:
    """Compare steps of `lone_rank` alone with steps of all ranks; collective.

    Takes about thirty steps. `parts`: number of samples of each rank in a step of all ranks.
    """
    # a tie goes to all ranks, because a rank that leaves does not return
    turns = Turns((TOGETHER, ALONE), num_rounds=2, num_timed=5)
    whole = [sum(parts) if rank == lone_rank else 0 for rank in range(group.world_size)]
    clock = clock_for(group.device)
    while not turns.settled:
        if turns.name == TOGETHER:
            weight = parts[group.rank] * group.world_size / sum(parts)
            made = stepping(setup, group, parts[group.rank], weight, replicate)
        else:
            made = stepping(setup, group, whole[group.rank], 1.0, None)
        seconds = []
        with made as step:
            for _ in range(turns.num_settling + turns.num_timed):
                start = clock.mark()
                step()
                [began, ended] = clock.seconds([start, clock.mark()])
                # gather after each step, so that no rank waits longer than a step
                seconds.append(max(group.gather(ended - began)))
        turns.add(seconds[-turns.num_timed :])
    found = turns.seconds
    return Comparison(found[ALONE], found[TOGETHER], turns.name == ALONE)


@contextmanager
def stepping(
    setup: TrainingSetup,
    group: Group,
    num_samples: int,
    weight: float,
    replicate: Callable[[nn.Module], ModelReplica] | None,
) -> Iterator[Step]:
    """Yield a function that takes a step of a copy of the model.

    Without `replicate`, a rank with samples trains alone, and other ranks do nothing. `weight`:
    factor of this rank's mean loss.
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
