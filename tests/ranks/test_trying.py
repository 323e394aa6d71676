"""Trials of exchanges between ranks, on a clock that the test moves."""

import gc
import weakref

import pytest
import torch

from paceline.core.plan import Kind
from paceline.exchange.trials import Trials
from paceline.exchange.trying import Trying
from paceline.links.rendezvous import joined
from paceline.record.recorder import Recorder
from paceline.strategies import find_strategy
from pair import Ranks
from replicas import EXCHANGES, Net, build, check, parallel_of, train
from ticking import Ticking


def chosen_again(num_before: int, num_after: int) -> list[str]:
    """Slow down DDP's reducer after it was chosen; return the exchanges before and after."""
    module, oracle = build(Net)
    parallel = parallel_of(module, "auto", chunk=1)
    seconds, found = {"allreduce": 0.01, "tree": 0.02, "host": 0.02}, []
    assert parallel._trials is not None
    clock = parallel._trials._clock = Ticking()

    def before(step: int) -> None:
        clock.now += seconds[parallel._method.name]

    for first, last in ((0, num_before), (num_before, num_before + num_after)):
        train(parallel, oracle, range(first, last), before)
        found.append(parallel.statistics().exchange)
        seconds["allreduce"] = 0.1
    check(parallel, oracle)
    return found


def test_another_exchange_replaces_torchs_reducer_when_steps_become_slower(pair: Ranks):
    for before, after in pair(chosen_again, 150, 200):
        assert before == "allreduce"
        assert after in ("host", "tree")


def recorded(steps: int) -> tuple[str, list[str]]:
    """Attach a recorder to the first method; return the chosen method, and what is recorded."""
    module, oracle = build(Net)
    group = joined(torch.device("cpu"), 20.0)
    records = {name: find_strategy(name) for name in EXCHANGES}
    methods = {name: one.runner().method(one.config()) for name, one in records.items()}
    clock = Ticking()
    trials, recorder = Trials(methods, clock), Recorder(clock, "cpu", group.rank)
    trying = Trying(module, methods, trials, group=group)
    trying.record(recorder)

    def before(step: int) -> None:
        clock.now += 0.01 if trials.name == "host" else 0.02

    train(trying, oracle, range(steps), before)
    recorder.start_trace()
    train(trying, oracle, range(steps, steps + 3), before)
    check(trying, oracle)
    exchange = trying.statistics().exchange
    trying.close()
    return exchange, sorted({span.kind.value for span in recorder.spans()})


def test_a_recorder_records_the_methods_tried_later_too(pair: Ranks):
    for exchange, kinds in pair(recorded, 60):
        assert exchange == "host"
        assert {Kind.D2H.value, Kind.REDUCE.value} <= set(kinds)


def tried(slow: list[str]) -> tuple[str, str, bool]:
    """Return the exchange of the first step, its name in the trials, and whether it was freed."""
    module, oracle = build(Net)
    methods = {name: find_strategy(name).runner() for name in EXCHANGES}
    methods = {name: one.method(find_strategy(name).config()) for name, one in methods.items()}
    trials = Trials(methods, clock := Ticking(), slow)
    trying = Trying(module, methods, trials, group=joined(torch.device("cpu"), 20.0))
    first, name = weakref.ref(trying._gradients), trials.name
    train(trying, oracle, range(1))
    used = trying.statistics().exchange

    def before(step: int) -> None:
        clock.now += 0.02 if trials.name == used else 0.01

    train(trying, oracle, range(1, 60), before)
    check(trying, oracle)
    assert trying.statistics().exchange == trials.name != used
    trying.close()
    gc.collect()
    return used, name, first() is None


@pytest.mark.parametrize("slow", [[], ["allreduce"]])
def test_the_first_exchange_is_one_that_may_be_fast_and_is_freed_once_another_is_used(
    pair: Ranks, slow: list[str]
):
    for used, name, is_freed in pair(tried, slow):
        assert used == name not in slow
        assert is_freed
