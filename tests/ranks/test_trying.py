"""Trials of exchanges between ranks, on a clock that the test moves."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

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


def tried(slow: list[str]) -> tuple[str, str, bool, set[Kind]]:
    """Try exchanges, of which `host` is the fastest, with a recorder.

    Returns the exchange of the first step, its name in the trials, whether it was freed, and what
    is recorded at the end.
    """
    module, oracle = build(Net)
    methods = {name: find_strategy(name).runner() for name in EXCHANGES}
    methods = {name: one.method(find_strategy(name).config()) for name, one in methods.items()}
    trials, group = Trials(methods, clock := Ticking(), slow), joined(torch.device("cpu"), 20.0)
    trying, recorder = Trying(module, methods, trials, group=group), Recorder(clock, "cpu", 0)
    trying.record(recorder)
    first, name = weakref.ref(trying._gradients), trials.name
    train(trying, oracle, range(1))
    used = trying.statistics().exchange

    def before(step: int) -> None:
        clock.now += 0.01 if trials.name == "host" else 0.02

    train(trying, oracle, range(1, 60), before)
    recorder.start_trace()
    train(trying, oracle, range(60, 63), before)
    check(trying, oracle)
    assert trying.statistics().exchange == trials.name == "host"
    trying.close()
    gc.collect()
    return used, name, first() is None, {span.kind for span in recorder.spans()}


@pytest.mark.parametrize("slow", [[], ["allreduce"]])
def test_the_first_exchange_may_be_fast_is_freed_later_and_the_others_are_recorded_too(
    pair: Ranks, slow: list[str]
):
    for used, name, is_freed, kinds in pair(tried, slow):
        assert used == name not in (*slow, "host")
        assert is_freed
        assert {Kind.D2H, Kind.REDUCE} <= kinds


def closed(exchange: str, codec: str | None) -> list[int]:
    """Train and close an exchange several times; return the numbers of open descriptors."""
    found = []
    for _ in range(3):
        parallel = parallel_of(nn.Linear(6, 6), exchange, codec=codec)
        parallel(torch.ones(4, 6)).sum().backward()
        parallel.close()
        del parallel
        gc.collect()
        found.append(len([*Path("/proc/self/fd").iterdir()]))
    return found


@pytest.mark.parametrize(
    ("exchange", "codec"), [("allreduce", "dynamic8"), ("host", None), ("host", "dynamic8")]
)
def test_a_closed_exchange_keeps_no_connections(pair: Ranks, exchange: str, codec: str | None):
    for first, *later in pair(closed, exchange, codec):
        assert later == [first] * 2
