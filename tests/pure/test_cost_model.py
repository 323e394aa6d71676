"""The plans of host and tree, and what they leave after backward, against Le et al. 2018."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import WithoutUpdate, box, chain, link
from closed_forms import (
    LayerPhases,
    backpropagation_s,
    host_overhead_s,
    host_s,
    processing_s,
    typical_s,
)
from findings import numbers
from paceline.core.after_backward import AfterBackward, BackwardPhase
from paceline.core.cost import Slowed
from paceline.core.durations import duration
from paceline.core.plan import Plan
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Strategy, Window
from paceline.planner.backward import after_backward_sentence
from paceline.strategies import host, tree
from paceline.strategies.tree.config import Tree

NBYTES_PER_S, ADDS_PER_S, SYNC_S = 1e6, 5e6, 0.01
layers = st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(1, 10**5)), min_size=1, max_size=8)


def left(strategy: Strategy, workload, machine, workers: int, num_steps: int = 2) -> AfterBackward:
    """Return what a strategy says of its plan."""
    config, cost = strategy.config(workers=workers), Slowed(WithoutUpdate(machine), 1.0)
    plan = strategy.plan(workload, machine, config, Window(num_steps))
    return strategy.after_backward(BackwardPhase(plan, cost, simulate(plan, cost)))


def in_turn(sizes):
    """Return the layers with so long a backward that no copy ever waits for another."""
    wire_times = [(t_bp, 4 * n / NBYTES_PER_S) for t_bp, n in sizes]
    times = [LayerPhases(t_bp, SYNC_S, 2 * t, t) for t_bp, t in wire_times]
    return [
        before._replace(t_bp=max(before.t_bp, later.t_aa + later.t_bc))
        for before, later in pairwise(times)
    ] + times[-1:]


def says(text: str, seconds: float) -> bool:
    """Return True if the text has this time, whichever way it was rounded."""
    return any(duration(seconds * (1 + off)) in text for off in (-1e-9, 1e-9))


@given(layers)
def test_host_states_definitions_3_1_to_3_3(sizes):
    links = [link(f"gpu{i}", "h", NBYTES_PER_S) for i in range(2)]
    sums = {"memory_bandwidth_bytes_per_s": 3 * NBYTES_PER_S}  # two are read and one is written
    machine = box("gpu", "gpu", links=links, host=sums, device={"sync_latency_s": SYNC_S})
    times = in_turn(sizes)
    work = chain(*[(one.t_bp, 4 * n) for one, (_, n) in zip(times, sizes, strict=True)])
    found = left(host.STRATEGY, work, machine, workers=2)
    assert found.backward_s == pytest.approx(backpropagation_s(times), rel=1e-9)
    assert found.sync_s == pytest.approx(SYNC_S * len(times), rel=1e-9)
    assert found.total_s == pytest.approx(host_s(times), rel=1e-9)
    assert found.overhead_s == pytest.approx(host_overhead_s(times), rel=1e-6)
    assert found.left_s == pytest.approx(found.overhead_s - found.sync_s, rel=1e-6)
    decides = processing_s(times).index(max(processing_s(times)))
    assert f"l{decides}," in found.because
    assert says(found.because, host_s(times))


@given(layers, st.sampled_from([2, 4, 8]))
def test_tree_states_definition_3_4(sizes, workers):
    names, levels = [f"gpu{i}" for i in range(workers)], workers.bit_length() - 1
    links = [link(a, b, NBYTES_PER_S) for i, a in enumerate(names) for b in names[:i]]
    device = {"memory_bandwidth_bytes_per_s": ADDS_PER_S}
    machine = box(*["gpu"] * workers, links=links, device=device)
    work = chain(*[(t_bp, 4 * n) for t_bp, n in sizes])
    wire_s, add_s = levels * 4 / NBYTES_PER_S, levels * 4 * 3 / ADDS_PER_S  # of a value
    times = [LayerPhases(t_bp, 0.0, n * (wire_s + add_s), n * wire_s) for t_bp, n in sizes]
    found = left(tree.STRATEGY, work, machine, workers)
    assert (found.backward_s, found.sync_s) == (pytest.approx(backpropagation_s(times)), 0.0)
    assert found.total_s == pytest.approx(typical_s(times), rel=1e-9)
    assert found.left_s == pytest.approx(found.overhead_s, rel=1e-6)
    summed_s, down_s = (sum(getattr(one, name) for one in times) for name in ("t_aa", "t_bc"))
    assert all(says(found.because, one) for one in (summed_s, down_s, typical_s(times)))

    def window(num_steps: int) -> Plan:
        return tree.STRATEGY.plan(work, machine, Tree(workers=workers), Window(num_steps))

    cost = WithoutUpdate(machine)
    assert simulate(window(1), cost).makespan_s == pytest.approx(typical_s(times), rel=1e-9)
    assert period(window, cost, 2) == pytest.approx(typical_s(times), rel=1e-9)


def of_plan(name, left_s, overhead_s, *, workers=2, codec=None):
    told = None
    if left_s is not None:
        told = AfterBackward(0.1, overhead_s - left_s, left_s, 0.1 + overhead_s, f"{name} does so")
    return SimpleNamespace(
        strategy=name, workers=workers, placement="as listed", codec=codec, after_backward=told
    )


def test_the_smaller_overhead_decides_and_not_what_is_left():
    # Many small layers: host leaves less after backward, but its synchronisations cost more.
    said = after_backward_sentence([of_plan("tree", 0.004, 0.004), of_plan("host", 0.001, 0.006)])
    # Backward, workers, left with tree and host; then what each adds, the least first.
    assert numbers(said)[:6] == [100, 2, 4, 1, 4, 6]
    assert said.rindex("(tree)") < said.rindex("(host)")


def test_plans_with_codecs_or_on_other_workers_are_not_compared():
    alone = [of_plan("host", 0.001, 0.002), of_plan("tree", 0.004, 0.004, workers=4)]
    said = after_backward_sentence([of_plan("host", 0.0, 0.0, codec="half"), *alone])
    assert numbers(said) == [100, 2, 1]
    assert "tree" not in said
    assert after_backward_sentence([of_plan("allreduce", None, None)]) is None
