"""How much is given beforehand: never so much that others wait, nor a long batch twice."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies.hogbatch.policy import MOST_REPORTED, wants_more

BATCH_S = st.floats(1e-6, 10.0)
LEFT_S = st.floats(0.0, 100.0)


def taken(batch_s: float, left_s: float, depth: int = 1, prefetches: bool = True) -> list[float]:
    """Return the batches that are given until no more are wanted."""
    given_s: list[float] = []
    while wants_more(given_s, left_s, depth, prefetches=prefetches):
        given_s.append(batch_s)
    return given_s


@given(BATCH_S, LEFT_S)
def test_there_is_work_and_not_too_much(batch_s: float, left_s: float):
    given_s = taken(batch_s, left_s)
    assert 1 <= len(given_s) <= MOST_REPORTED
    # Without its last batch what is given is shorter than both limits.
    assert len(given_s) == 1 or sum(given_s[:-1]) < min(0.05, left_s / 10)


def test_a_batch_of_eleven_milliseconds_has_four_behind_it():
    assert len(taken(0.011, left_s=60.0)) == 5


def test_at_the_end_of_an_epoch_nobody_has_more_than_one():
    assert len(taken(0.011, left_s=0.0)) == 1


def test_a_batch_of_one_sample_that_takes_long_stays_alone():
    assert len(taken(0.066, left_s=60.0)) == 1


@given(st.sampled_from([0.06, 0.3, 5.0]), st.integers(1, 3), st.booleans())
def test_of_long_batches_a_worker_has_as_many_as_it_has_in_work(batch_s, depth, prefetches):
    assert len(taken(batch_s, 100 * batch_s, depth, prefetches)) == depth


def test_at_the_end_of_an_epoch_a_gpu_has_no_batch_that_others_would_wait_for():
    """Half of its first is done, on average; what is left are seconds of all workers."""
    assert len(taken(1.0, left_s=0.4, depth=3)) == 1
    assert len(taken(1.0, left_s=1.4, depth=3)) == 2
    assert len(taken(1.0, left_s=1.6, depth=3)) == 3


def test_of_batches_of_unknown_length_it_has_as_many_too():
    assert len(taken(inf, left_s=0.0, depth=3)) == 3


def test_no_batch_is_given_early_where_learning_rates_depend_on_the_latest():
    assert len(taken(0.001, left_s=60.0, prefetches=False)) == 1
    assert len(taken(0.001, left_s=60.0, depth=3, prefetches=False)) == 3
