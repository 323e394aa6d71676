"""Searches plan groups of layers in short windows, with the same results as full plans."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.core.chunks import candidates
from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.simulate import makespan_s, period, simulate, steady_period
from paceline.core.strategy import Window, codec_fields
from paceline.core.workload import Workload
from paceline.planner.grouping import Windows, with_best_chunk
from paceline.planner.steady import steady
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.strategies import STRATEGIES

NUM_STEPS = 8


def question(model: str, name: str) -> tuple[Workload, Machine]:
    """Return a recorded model, and a machine with all its devices."""
    found = recorded(model, 16)
    assert found is not None
    machine = find_machine(name)
    return found, machine.for_workers(machine.num_devices, True).reached


def plan_of(name: str, work: Workload, machine: Machine, config: Any, num_steps: int) -> Plan:
    return STRATEGIES[name].planning.plan(work, machine, config, Window(num_steps))


@pytest.mark.parametrize("strategy", ["host", "hierarchy"])
@pytest.mark.parametrize("name", ["two-hosts-gigabit", "2x2xa100-80gb+1xib-hdr"])
def test_the_best_chunk_has_the_shortest_period(name, strategy):
    work, machine = question("resnet18", name)
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
    found = steady_period(timeline, NUM_STEPS)
    assert found == pytest.approx(longer_s / NUM_STEPS, rel=1e-9)
    short = simulate(plan_of(name, work, machine, config, 2), prices)
    assert steady_period(short, 2) is None  # the first and the last step are not typical


@pytest.mark.parametrize("name", ["allreduce", "host", "tree", "hierarchy", "wheel", "subbatch"])
@pytest.mark.parametrize(
    ("on", "codec"),
    [("k40-gigabit", None), ("two-hosts-gigabit", "dynamic8"), ("power8-p100", None)],
)
def test_groups_of_layers_take_as_long_as_layers(name, on, codec):
    work, machine = question("resnet18", on)
    known = STRATEGIES[name]
    config = known.config(workers=2)
    config = replace(config, **dict.fromkeys(codec_fields(config), codec))
    if name == "hierarchy":
        config = replace(config, chunk=5)
    windows = Windows(known, work, machine, config)
    for num_steps in (1, 2, 5):
        expected = makespan_s(windows.of_layers(num_steps), windows.model)
        found = makespan_s(windows.of(num_steps), windows.cost)
        assert found == pytest.approx(expected, rel=1e-9)
    spans = steady(windows).timeline.spans
    parts = {layer.name for layer in work.layers}
    assert parts <= {span.part for span in spans}  # so that drawings show every layer


def test_a_strategy_without_exchanges_during_backward_is_planned_in_few_tasks():
    work, machine = question("resnet18", "k40-gigabit")
    tree = STRATEGIES["tree"]
    windows = Windows(tree, work, machine, tree.config(workers=2))
    assert len(windows.of(1)) < len(windows.step) / 5
