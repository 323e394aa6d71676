"""The machine that is fitted to trials gives their times back, and batches conform to plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.compare import conform
from paceline.core.cost import Roofline
from paceline.core.plan import Cost, Kind
from paceline.core.simulate import simulate
from paceline.core.workload import Layer, Parameter, Workload
from paceline.strategies.hogbatch import statistics
from paceline.strategies.hogbatch.calibration import (
    SpeedTrial,
    machine_of,
    plan_of_batches,
    traced_sizes,
)
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec


def workload() -> Workload:
    layers = tuple(
        Layer(
            name,
            (Parameter("weight", (64, 64)),),
            4 * 64 * 32,
            Cost(flops=1e6, nbytes=4e4, num_calls=2),
            Cost(flops=2e6, nbytes=8e4, num_calls=3),
        )
        for name in ("one", "two")
    )
    return Workload("net", 32, layers, backward_order=(1, 0), input_nbytes=4 * 64 * 32)


def seconds(threads: int, measured: dict[int, float], size: int, kind="cpu") -> float:
    spec = WorkerSpec(kind, threads=threads)
    machine = machine_of(workload(), [SpeedTrial(0, spec, measured)])
    plan = plan_of_batches(workload(), machine, Hogbatch(), {0: spec}, {0: [size]})
    return simulate(plan, Roofline.of(machine)).makespan_s


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("threads", [1, 4])
def test_both_sizes_take_as_long_as_they_were_tried(threads: int, kind):
    threads = threads if kind == "cpu" else 1
    measured = {threads: 1e-3, 32: 5e-3}
    for size, took in measured.items():
        assert seconds(threads, measured, size, kind) == pytest.approx(took, rel=1e-6)


def test_a_size_between_lies_between():
    measured = {1: 1e-3, 32: 5e-3}
    middle = seconds(1, measured, 16)
    assert middle == pytest.approx(1e-3 + 15 / 31 * 4e-3, rel=1e-6)


@given(st.floats(1e-5, 1.0), st.floats(1e-5, 1.0))
def test_noise_leaves_the_larger_batch_as_it_was_tried(small_s: float, large_s: float):
    """A small batch may come out slower than a large one; rates stay positive all the same."""
    assert seconds(1, {1: small_s, 32: large_s}, 32) == pytest.approx(large_s, rel=1e-6)


def test_one_size_is_enough_for_a_rate():
    assert seconds(1, {32: 5e-3}, 32) == pytest.approx(5e-3, rel=1e-6)


def test_a_replay_has_the_batches_of_the_trace():
    specs = {0: WorkerSpec("cpu"), 1: WorkerSpec("cpu", threads=2, slow=4.0), 2: WorkerSpec("gpu")}
    trials = [SpeedTrial(n, spec, {spec.threads: 1e-3, 32: 4e-3}) for n, spec in specs.items()]
    machine = machine_of(workload(), trials)
    sizes = {0: [1, 2, 4], 1: [8, 2], 2: [32]}
    plan = plan_of_batches(workload(), machine, Hogbatch(), specs, sizes)
    timeline = simulate(plan, Roofline.of(machine))
    assert conform(plan, timeline) == []
    assert traced_sizes(timeline.spans) == sizes
    assert statistics.num_samples(timeline) == {"cpu0": 7, "cpu1": 10, "gpu2": 32}
    assert {span.kind for span in timeline.spans} >= {Kind.H2D, Kind.D2H, Kind.REDUCE}
