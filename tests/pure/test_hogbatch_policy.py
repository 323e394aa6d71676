"""Built-in and user-defined policies, and the setting `workers`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.records.settings import check_options
from paceline.strategies.hogbatch import STRATEGY
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec, adding_threads, parse_workers
from paceline.strategies.hogbatch.policy import (
    POLICIES,
    AdaptivePolicy,
    constant,
    policy_of,
)
from refusals import refused

CPU, GPU = WorkerSpec("cpu", 56), WorkerSpec("gpu")
SPEEDS = (10.0, 2360.0)


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        ("hogwild", (56, 1)),  # one sample a thread
        ("hogbatch", (8192, 8192)),  # algorithm 1: the same for all
        ("cpu_gpu", (56, 8192)),  # section VI-B
        ("proportional", (69, 16315)),  # 2 x 8192 x 10 / 2370 is 69.1
        ("adaptive", (56, 8192)),  # section VI-C: begins with the lower and the upper threshold
    ],
)
def test_first_batches_are_the_papers(policy, sizes):
    assert policy in POLICIES
    config = Hogbatch(policy=policy, cpu_batch=(1, 64), gpu_batch=(128, 8192))
    made = policy_of(config, [CPU, GPU], SPEEDS, 8192)
    assert tuple(made.next_batch(worker, (0.0, 0.0), (0, 0)) for worker in (0, 1)) == sizes
    assert all(size <= most for size, most in zip(sizes, made.most, strict=True))


@pytest.mark.parametrize(
    ("bounds", "spec", "batch_size", "expected"),
    [
        # Thresholds of CPU workers are per thread.
        ({"cpu_batch": (2, 64)}, CPU, 8192, (112, 3584)),
        ({"gpu_batch": (128, 8192)}, GPU, 8192, (128, 8192)),
        # By default a GPU gets at most the workload's batch.
        ({}, GPU, 256, (4, 256)),
        ({}, GPU, 8, (1, 8)),
    ],
)
def test_batches_stay_within_thresholds(bounds, spec, batch_size, expected):
    made = policy_of(Hogbatch(**bounds), [spec], SPEEDS[:1], batch_size)
    assert (*made.least, *made.most) == expected


@pytest.mark.parametrize(
    ("updates", "size", "expected"),
    [
        ((4, 5, 6), 32, 12),  # fewer updates than all others: divided by 2.5, and rounded down
        ((5, 5, 6), 32, 32),  # as few as another worker: unchanged
        ((6, 5, 6), 32, 32),
        ((7, 5, 6), 33, 83),  # more updates than all others: multiplied, and rounded up
        ((4, 5, 6), 5, 4),  # limited by a threshold
        ((7, 5, 6), 60, 100),
    ],
)
def test_adaptive_is_algorithm_2(updates, size, expected):
    config = Hogbatch(cpu_batch=(4, 100), alpha=2.5)
    policy = policy_of(config, [WorkerSpec("cpu", 1)] * 3, (1.0,) * 3, 32)
    assert policy.next_batch(0, updates, (size, 1, 1)) == expected


@given(size=st.integers(1, 10_000), alpha=st.floats(1.001, 8))
def test_rounding_never_keeps_a_size_that_must_change(size, alpha):
    # Rounding to the nearest integer would never change small sizes.
    policy = AdaptivePolicy((1, 1), (0, 0), (10**6,) * 2, alpha)
    assert policy.next_batch(0, (1, 2), (size, 1)) < size
    assert policy.next_batch(0, (2, 1), (size, 1)) > size


def test_threads_without_a_sample_make_no_update():
    assert [CPU.num_updates(size) for size in (56, 3584, 10, 0)] == [56, 56, 10, 0]
    assert [GPU.num_updates(size) for size in (8192, 0)] == [1, 0]
    assert constant((3, 4)).next_batch(1, (0, 100), (3, 4)) == 4  # ignores the counts


def test_updates_that_other_threads_overwrite_do_not_count():
    config = Hogbatch(beta=0.5)
    assert (config.weighted(CPU, 10), config.weighted(GPU, 10)) == (5, 10)


class Nested:
    class Growing:
        """Increases each batch by one sample, up to twice the run's batch size."""

        def __init__(self, workers):
            self.most = [2 * workers.batch_size] * len(workers.specs)
            self.asked = []

        def next_batch(self, worker, updates, sizes):
            self.asked.append((worker, updates))
            return min(sizes[worker] + 1, self.most[worker])


class Boundless:
    def __init__(self, workers):
        pass

    def next_batch(self, worker, updates, sizes):
        return None if worker else 5


class Silent(Boundless):
    most = (4, 4)


class Failing(Silent):
    def next_batch(self, worker, updates, sizes):
        raise KeyError("no such worker")


class Unmade:
    pass


def sized(workers):
    return object()


def made(name: str):
    """Return a user-defined policy of this module."""
    specs = (WorkerSpec("cpu", 2), WorkerSpec("gpu"))
    return policy_of(Hogbatch(policy=f"{__name__}:{name}"), specs, (1.0, 2.0), 8)


def test_a_user_defined_policy_is_called_like_the_built_in_ones():
    policy = made("Nested.Growing")
    assert policy.most == (16, 16)
    sizes = [policy.next_batch(0, [1.0, 0.0], [size, 3]) for size in (0, 1, 15, 16)]
    assert sizes == [1, 2, 16, 16]
    assert policy.policy.asked[0] == (0, (1.0, 0.0))


OWN = [f"{__name__}:{name}" for name in ("Missing", "Unmade", "sized", "Boundless")]


@pytest.mark.parametrize("policy", ["no_such:Policy", *OWN])
def test_an_invalid_policy_is_refused(policy: str):
    with refused("policy"):
        policy_of(Hogbatch(policy=policy), [CPU], SPEEDS[:1], 8)


@pytest.mark.parametrize("name", ["omnivore", "a:", ":b", "a b:c", "a.1:c", ""])
def test_invalid_names_are_refused(name: str):
    with refused("options.policy"):
        check_options(STRATEGY, {"policy": name}, 2)


@pytest.mark.parametrize(("name", "worker"), [("Silent", 0), ("Silent", 1), ("Failing", 1)])
def test_every_size_is_checked(name: str, worker: int):
    policy = made(name)
    with refused("policy", got=policy.name):
        policy.next_batch(worker, (0.0, 0.0), (0, 0))


@pytest.mark.parametrize("text", ["cpu:4096@slow=2.5, cpu:2@slow=1.000001, gpu:10", "cpu:1, cpu:1"])
def test_a_list_of_workers_is_written_as_it_was_read(text: str):
    assert ", ".join(map(str, parse_workers(text, 2))) == text


@pytest.mark.parametrize(("number", "threads"), [(1, 4), (2, 2), (3, 1), (5, 1)])
def test_a_number_of_workers_shares_the_cores(number: int, threads: int):
    assert parse_workers(str(number), 4) == (WorkerSpec("cpu", threads),) * number


@pytest.mark.parametrize(
    ("text", "named"),
    [
        *[(one, one) for one in ("", "cpu", "-1", "1_0", "cpu:0", "gpu:0@slow=2")],
        *[(f"cpu:1@{one}", f"cpu:1@{one}") for one in ("slow=0.5", "slow=", "slow=inf", "fast=2")],
        ("cpu:1,,cpu:1", ""),
        ("cpu:1,tpu:1", "tpu:1"),
        ("gpu:1,cpu:1,gpu:1", "gpu:1"),
        *[("0", 0), ("257", 257), (",".join(["cpu:1"] * 257), 257)],
    ],
)
def test_an_invalid_worker_is_named(text: str, named: str | int):
    with refused("workers", got=named):
        parse_workers(text, 2)


@pytest.mark.parametrize(
    ("workers", "threads"),
    [
        *[("gpu:0", 16), ("cpu:12,gpu:0", 4), ("cpu:4,gpu:0,cpu:4,gpu:1", 4)],
        *[("cpu:16,gpu:0", 1), ("cpu:32,gpu:0,gpu:1", 1), ("cpu:3", 13)],
    ],
)
def test_the_cores_without_workers_add_the_updates_of_gpus(workers, threads):
    assert adding_threads(parse_workers(workers, 16), 16) == threads
