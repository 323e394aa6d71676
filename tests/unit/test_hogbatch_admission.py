"""Speed trials of asynchronous workers: the fitted machine, and admission."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from findings import numbers
from hogbatches import POLICIES, num_samples, per_sample
from paceline.core.compare import conform
from paceline.core.cost import Roofline
from paceline.core.plan import Cost, Kind
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.workload import Layer, Parameter, Workload
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import BatchResult, SpeedTrial
from paceline.strategies.hogbatch.plan import plan
from paceline.strategies.hogbatch.speed_trial import (
    Epochs,
    admit,
    machine_of,
    plan_of_batches,
    predict,
    unburdened,
)
from paceline.strategies.hogbatch.statistics import traced_sizes
from paceline.strategies.hogbatch.worker import median_seconds
from papers.hogbatch import updates, utilisation

BATCH = 64
WORK = per_sample(BATCH, numel=8)


def trial(number: int, per_sample_s: float, kind="cpu", threads: int = 1, slow: float = 1.0):
    """Create a trial whose batch times are proportional to the number of samples."""
    spec = WorkerSpec(kind, threads, slow=slow)
    return SpeedTrial(number, spec, {1: per_sample_s, BATCH: BATCH * per_sample_s})


def epochs(policy: str, num_batches: int, num_epochs: int = 1, cores: int = 8, **options) -> Epochs:
    config = Hogbatch(policy=policy, **options)
    return Epochs(WORK, config, num_batches * BATCH, num_epochs, cores)


@pytest.mark.parametrize(
    ("num_batches", "ratio", "helps", "batches_of_slow"),
    [(20, 236.0, False, 1), (22, 16.0, False, 2), (2000, 16.0, True, 118)],
)
def test_at_the_end_of_an_epoch_the_others_wait_for_a_slow_one(
    num_batches: int, ratio: float, helps: bool, batches_of_slow: int
) -> None:
    """The last batch of the slow worker ends the epoch.

    After the time of t batches of the fast worker, that worker has begun t + 1 batches and the
    slow one t // ratio + 1.
    """
    workers, asked = [trial(0, 1.0), trial(1, ratio)], epochs("hogbatch", num_batches)
    assert (not admit(asked, workers)) is helps
    took_s = num_batches * BATCH / predict(asked, workers).samples_per_s
    assert took_s == pytest.approx(batches_of_slow * ratio * BATCH, rel=1e-3)
    # Nobody waits long for a small batch.
    assert not admit(epochs("hogwild", 22), [trial(0, 1.0), trial(1, 16.0)])


@pytest.mark.parametrize(("cores", "helps"), [(1, False), (2, True)])
@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_a_second_worker_on_the_only_core_adds_no_speed(
    cores: int, helps: bool, slow: float
) -> None:
    """Trials run together: on one core each worker is slower than alone."""
    share = min(1.0, cores / (1 + 1 / slow))
    workers = [trial(0, 1.0 / share), trial(1, slow / share, slow=slow)]
    asked = epochs("hogwild", 500, cores=cores)
    useless = admit(asked, workers)
    assert (not useless) is helps
    speeds = [predict(asked, workers).samples_per_s, speed_of_others(asked, workers)]
    assert speeds == pytest.approx([1.0 if cores == 1 else 1 + 1 / slow, 1.0], rel=2e-3)
    for reason in useless.values():
        assert numbers(reason)[-2:] == pytest.approx(speeds, rel=1e-3)


def speed_of_others(asked: Epochs, workers: list[SpeedTrial]) -> float:
    """Predict the speed without the last worker."""
    return predict(asked, unburdened(workers, workers[-1], asked.num_cores)).samples_per_s


def test_a_gpu_needs_no_core_and_is_not_faster_without_a_worker() -> None:
    asked, workers = epochs("hogbatch", 500, cores=1), [trial(0, 0.1, "gpu"), trial(1, 1.0)]
    assert not admit(asked, workers)
    assert speed_of_others(asked, workers) == pytest.approx(10.0)


def test_unhelpful_workers_are_named_slowest_first_and_one_is_left() -> None:
    crowd = [trial(number, 4.0 + 0.01 * number) for number in range(4)]
    useless = admit(epochs("hogwild", 100, cores=1), crowd)
    assert list(useless) == [3, 2, 1]
    # Alone, the fastest worker has the whole core.
    assert numbers(useless[1])[-1] == pytest.approx(1.0, rel=1e-3)
    assert not admit(epochs("hogwild", 100, cores=1), crowd[:1])


def test_policy_adaptive_alone_keeps_to_its_smallest_batch() -> None:
    """With a slow worker the fast one gets large batches, which are cheaper per sample."""
    fast = SpeedTrial(0, WorkerSpec("cpu"), {1: 1.0, BATCH: 2.0})
    slow = SpeedTrial(1, WorkerSpec("cpu"), {1: 16.0, BATCH: 32.0})
    asked = epochs("adaptive", 200, num_epochs=3, cpu_batch=(1, BATCH))
    assert not admit(asked, [fast, slow])
    assert speed_of_others(asked, [fast, slow]) == pytest.approx(1.0, rel=1e-3)
    assert predict(asked, [fast, slow]).samples_per_s > 16


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kinds", [("cpu", "cpu"), ("cpu", "gpu")])
def test_long_epochs_are_as_fast_as_the_plan_of_an_endless_run(policy: str, kinds) -> None:
    trials = [trial(0, 3.0, kinds[0]), trial(1, 0.5, kinds[1])]
    machine, config = machine_of(WORK, trials), Hogbatch(policy=policy, threads=1)
    steps = 20 if policy == "hogwild" else 100  # its batches are small
    timeline = simulate(plan(WORK, machine, config, Window(steps)), Roofline.of(machine))
    going_on = sum(num_samples(timeline).values()) / timeline.makespan_s
    found = predict(Epochs(WORK, config, 400 * BATCH, 3, 8), trials)  # not simulated as a whole
    assert found.samples_per_s == pytest.approx(going_on, rel=0.03)
    assert found.utilisation == pytest.approx(utilisation(timeline), abs=0.03)
    made = {name: len(own) for name, own in updates(timeline).items()}
    shares = {name: own / sum(made.values()) for name, own in made.items()}
    assert found.shares == pytest.approx(shares, abs=0.03)


COSTS = Cost(flops=1e6, nbytes=4e4, num_calls=2), Cost(flops=2e6, nbytes=8e4, num_calls=3)
LAYERS = tuple(
    Layer(name, (Parameter("weight", (64, 64)),), 4 * 64 * 32, *COSTS) for name in ("one", "two")
)
TWO = Workload("net", 32, LAYERS, backward_order=(1, 0), input_nbytes=4 * 64 * 32)


def seconds(measured: dict[int, float], size: int, kind="cpu", threads: int = 1) -> float:
    """Predict the seconds of a batch on the machine fitted to a trial."""
    spec = WorkerSpec(kind, threads=threads)
    trials = [SpeedTrial(0, spec, measured)]
    tasks, machine = plan_of_batches(TWO, Hogbatch(), trials, {0: [size]})
    return simulate(tasks, Roofline.of(machine)).makespan_s


@pytest.mark.parametrize(("kind", "threads"), [("cpu", 1), ("cpu", 4), ("gpu", 1)])
def test_all_sizes_take_their_measured_times(threads: int, kind):
    expected = measured = {threads: 1e-3, 32: 5e-3}
    if threads == 1:  # linear between the measured sizes
        expected = {**measured, 16: 1e-3 + 15 / 31 * 4e-3}
    found = {size: seconds(measured, size, kind, threads) for size in expected}
    assert found == pytest.approx(expected, rel=1e-6)
    # One measured size is enough for a rate.
    assert seconds({32: 5e-3}, 32) == pytest.approx(5e-3, rel=1e-6)


@given(st.floats(1e-5, 1.0), st.floats(1e-5, 1.0))
def test_noise_does_not_change_the_time_of_the_larger_batch(small_s: float, large_s: float):
    """Even if the small batch was slower in the trial, all rates are positive."""
    assert seconds({1: small_s, 32: large_s}, 32) == pytest.approx(large_s, rel=1e-6)


def test_a_replay_has_the_batches_of_its_trace():
    specs = {0: WorkerSpec("cpu"), 1: WorkerSpec("cpu", threads=2, slow=4.0), 2: WorkerSpec("gpu")}
    trials = [SpeedTrial(n, spec, {spec.threads: 1e-3, 32: 4e-3}) for n, spec in specs.items()]
    sizes = {0: [1, 2, 4], 1: [8, 2], 2: [32]}
    tasks, machine = plan_of_batches(TWO, Hogbatch(), trials, sizes)
    timeline = simulate(tasks, Roofline.of(machine))
    assert conform(tasks, timeline) == []
    assert traced_sizes(timeline.spans) == sizes
    assert num_samples(timeline) == {"cpu0": 7, "cpu1": 10, "gpu2": 32}
    assert {span.kind for span in timeline.spans} >= {Kind.H2D, Kind.D2H, Kind.REDUCE}


class Scripted:
    """A replica with two batches in progress, which begin and end at given times."""

    def __init__(self, times: Sequence[tuple[int, int]]) -> None:
        self._times, self.num_begun = iter(times), 0

    def take(self, rows: Tensor, rate: float, step: int | None) -> list[BatchResult]:
        done = [self.result()] if self.num_begun == 2 else []
        self.num_begun += 1
        return done

    def done(self, *, waits: bool = False) -> Iterator[BatchResult]:
        while waits and self.num_begun:
            yield self.result()

    def result(self) -> BatchResult:
        self.num_begun -= 1
        started_ns, ended_ns = next(self._times)
        return BatchResult(1.0, started_ns, ended_ns=ended_ns)


@pytest.mark.parametrize(
    ("times", "median_ns"),
    [
        # Two batches warm up; the others end 4 to 9 ns apart, although each is in progress for 12.
        ([(end - 12, end) for end in (100, 200, 204, 209, 218, 222, 230)], 5),
        # After a pause a batch takes the time from its own begin to its end.
        ([(0, 10), (10, 20), (100, 107), (200, 208), (300, 309), (0, 0), (0, 0)], 8),
    ],
)
def test_a_trial_measures_the_time_between_the_ends_of_batches(times, median_ns: int):
    scripted = Scripted(times)
    assert median_seconds(scripted, 40, 10, 0.0) == pytest.approx(1e-9 * median_ns)
    assert scripted.num_begun == 0
