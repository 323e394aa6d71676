import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.policy import (
    AdaptivePolicy,
    FixedPolicy,
    expected_updates,
    policy_of,
    proportional_sizes,
    updates_of,
)

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
    config = Hogbatch(policy=policy, cpu_batch=(1, 64), gpu_batch=(128, 8192))
    made = policy_of(config, [CPU, GPU], SPEEDS, 8192)
    assert tuple(made.next_batch(worker, (0.0, 0.0), (0, 0)) for worker in (0, 1)) == sizes


def test_thresholds_of_cores_are_those_of_a_thread():
    made = policy_of(Hogbatch(cpu_batch=(2, 64), gpu_batch=(128, 8192)), [CPU, GPU], SPEEDS, 8192)
    assert (made.least, made.most) == ((112, 128), (3584, 8192))


@pytest.mark.parametrize(("batch_size", "expected"), [(256, (4, 256)), (8, (1, 8))])
def test_a_gpu_gets_at_most_the_workloads_batch_unless_told(batch_size, expected):
    made = policy_of(Hogbatch(), [GPU], SPEEDS[1:], batch_size)
    assert (made.least[0], made.most[0]) == expected


@pytest.mark.parametrize(
    ("updates", "size", "expected"),
    [
        ((4, 5, 6), 32, 16),  # behind all others: halved
        ((5, 5, 6), 32, 32),  # not behind all: as it was
        ((6, 5, 6), 32, 32),
        ((7, 5, 6), 32, 64),  # ahead of all: doubled
        ((4, 5, 6), 5, 4),  # thresholds hold
        ((7, 5, 6), 60, 100),
    ],
)
def test_adaptive_is_algorithm_2(updates, size, expected):
    policy = AdaptivePolicy((32, 32, 32), (4, 4, 4), (100, 100, 100))
    assert policy.next_batch(0, updates, (size, 1, 1)) == expected


@given(size=st.integers(1, 10_000), alpha=st.floats(1.001, 8))
def test_a_size_that_should_change_does(size, alpha):
    # Rounding to the nearest would leave small sizes as they are for ever.
    policy = AdaptivePolicy((1, 1), (0, 0), (10**6,) * 2, alpha)
    assert policy.next_batch(0, (1, 2), (size, 1)) < size
    assert policy.next_batch(0, (2, 1), (size, 1)) > size


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(1, 5000))
def test_proportional_hands_out_every_sample(speeds, total):
    sizes = proportional_sizes(speeds, total)
    exact = [total * speed / sum(speeds) for speed in speeds]
    assert all(abs(size - share) <= 1 for size, share in zip(sizes, exact, strict=True))
    if min(exact) >= 1:
        assert sum(sizes) == total


def test_threads_without_a_sample_make_no_update():
    assert updates_of(CPU, 56, 1.0) == updates_of(CPU, 3584, 1.0) == 56
    assert updates_of(CPU, 10, 0.5) == 5
    assert updates_of(GPU, 8192, 0.5) == 1
    assert updates_of(CPU, 0, 1.0) == updates_of(GPU, 0, 1.0) == 0


def test_fixed_sizes_do_not_look_at_counts():
    assert FixedPolicy((3, 4)).next_batch(1, (0, 100), (3, 4)) == 4


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cpu_batch": (64, 1)}, "write the smaller one first"),
        ({"gpu_batch": (0, 8)}, "write the smaller one first"),
        ({"alpha": 1.0}, "greater than 1"),
        ({"beta": 0.0}, "greater than 0"),
        ({"policy": "omnivore"}, "proportional"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(fields, says):
    with pytest.raises(ValidationError, match=says):
        Hogbatch(**fields)


def test_a_worker_without_work_sees_what_others_have_done_and_no_more():
    """Of twenty batches that the other was given none counts before it is done."""
    ahead = [[], [(0.001, 1.0)] * 20]
    assert expected_updates(0, [3.0, 7.0], ahead) == [3.0, 7.0]


def test_batches_ahead_count_by_the_time_at_which_the_next_one_begins():
    ahead = [[(0.5, 4.0), (0.5, 4.0)], [(0.3, 1.0)] * 9, [(2.0, 1.0)]]
    # At 1.0 s the second has done three, which end at 0.9, and the third none.
    assert expected_updates(0, [10.0, 20.0, 30.0], ahead) == [18.0, 23.0, 30.0]


BATCHES = st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(1, 8)), max_size=12)


@given(st.lists(BATCHES, min_size=1, max_size=4), st.data())
def test_expected_updates_are_between_those_made_and_those_given(ahead, data):
    worker = data.draw(st.integers(0, len(ahead) - 1))
    found = expected_updates(worker, [0.0] * len(ahead), ahead)
    given_out = [sum(updates for _, updates in batches) for batches in ahead]
    assert found[worker] == given_out[worker]
    assert all(0 <= one <= most for one, most in zip(found, given_out, strict=True))


def test_two_equal_workers_keep_their_sizes_however_many_batches_lie_ahead():
    """As if all but the last of the other were done, the first to be given some was doubled."""
    policy = AdaptivePolicy((8, 8), (1, 1), (512, 512))
    ahead, sizes = ([], []), [8, 8]
    for worker in (0, 1) * 10:
        updates = expected_updates(worker, [5.0, 5.0], ahead)
        sizes[worker] = policy.next_batch(worker, updates, sizes)
        ahead[worker].append((1.0, 1.0))
    assert sizes == [8, 8]
