"""A search simulates chunks in place of layers, and no window longer than it takes to be steady."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.core.chunks import candidates
from paceline.core.compare import breakdown
from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.simulate import makespan_s, period, simulate, steady_period
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.planner.best_chunk import with_best_chunk
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.strategies import STRATEGIES

MACHINES = ("k40-gigabit", "two-hosts-gigabit", "2x2xa100-80gb+1xib-hdr")
NUM_STEPS = 8


def question(model: str, name: str) -> tuple[Workload, Machine]:
    """A step of the model, and a machine for two workers or more."""
    found = recorded(model, 16)
    assert found is not None
    machine = find_machine(name)
    return found, machine.for_workers(machine.num_devices, True).reached


def plan_of(name: str, work: Workload, machine: Machine, config: Any, num_steps: int) -> Plan:
    return STRATEGIES[name].planning.plan(work, machine, config, Window(num_steps))


@pytest.mark.parametrize("strategy", ["host", "hierarchy"])
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("model", ["alexnet", "resnet18"])
def test_the_best_chunk_is_that_of_the_shortest_step_of_all_layers(model, name, strategy):
    work, machine = question(model, name)
    known = STRATEGIES[strategy]
    asked, prices = known.config(workers=machine.num_devices), Roofline.of(machine)
    seconds = {
        size: period(
            partial(plan_of, strategy, work, machine, replace(asked, chunk=size)), prices, 1
        )
        for size in candidates(len(work.layers))
    }
    found = with_best_chunk(work, machine, known, asked)
    assert seconds[found.chunk] == pytest.approx(min(seconds.values()), rel=1e-9)


@pytest.mark.parametrize("name", ["allreduce", "host", "tree", "wheel", "subbatch", "local"])
def test_a_steady_window_has_the_period_of_a_longer_one(name):
    work, machine = question("alexnet", "k40-gigabit")
    config, prices = STRATEGIES[name].config(workers=2), Roofline.of(machine)
    once, twice = (plan_of(name, work, machine, config, n) for n in (NUM_STEPS, 2 * NUM_STEPS))
    longer_s = makespan_s(twice, prices) - makespan_s(once, prices)
    timeline = simulate(once, prices)
    found = steady_period(timeline.outline, NUM_STEPS)
    assert found == pytest.approx(longer_s / NUM_STEPS, rel=1e-9)
    assert breakdown(timeline.outline) == breakdown(timeline)  # with fewer spans
    assert timeline.outline.steps() == timeline.steps()
    assert len(timeline.outline.spans) <= len(timeline.spans)
    short = simulate(plan_of(name, work, machine, config, 2), prices)
    assert steady_period(short, 2) is None  # the first step starts cold, the last ends alone
