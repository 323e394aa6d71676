from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.balance import apportion

speeds = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8)


@st.composite
def bounded(draw: st.DrawFn) -> tuple[int, list[float], list[int | None]]:
    """A batch that fits, with bounds on some workers."""
    own = draw(speeds)
    bound = st.one_of(st.none(), st.integers(0, 60))
    most = draw(st.lists(bound, min_size=len(own), max_size=len(own)))
    room = sum(500 if one is None else one for one in most)
    return draw(st.integers(0, min(room, 500))), own, most


@given(bounded())
def test_parts_sum_to_the_batch_and_stay_within_bounds(case) -> None:
    num_samples, own, most = case
    parts = apportion(num_samples, own, most)
    assert sum(parts) == num_samples
    assert min(parts) >= 0
    assert all(bound is None or part <= bound for part, bound in zip(parts, most, strict=True))


@given(st.integers(0, 500), speeds)
def test_a_faster_worker_never_gets_less(num_samples: int, own: list[float]) -> None:
    parts = apportion(num_samples, own)
    for (fast, more), (slow, less) in product(zip(own, parts, strict=True), repeat=2):
        assert fast <= slow or more >= less


@given(st.integers(0, 7), st.lists(st.integers(1, 300), min_size=1, max_size=3))
def test_no_other_split_is_done_earlier(num_samples: int, own: list[int]) -> None:
    parts = apportion(num_samples, [float(speed) for speed in own])

    def done(split) -> float:
        return max(part / speed for part, speed in zip(split, own, strict=True))

    splits = product(range(num_samples + 1), repeat=len(own))
    assert done(parts) <= min(done(split) for split in splits if sum(split) == num_samples)


@pytest.mark.parametrize(
    ("num_samples", "own", "most", "expected"),
    [
        (100, [4, 1], None, (80, 20)),
        (10, [1, 1, 1], None, (4, 3, 3)),
        # Largest remainders would give the slow one a sample, and the others would wait for it.
        (64, [100, 1], None, (64, 0)),
        (100, [3, 1], [50, None], (50, 50)),
        (100, [8, 1, 1], [20, 10, None], (20, 10, 70)),
        (5, [0, 1], None, (0, 5)),
        (0, [1, 2], None, (0, 0)),
        (3, [1e-300, 1e300], None, (0, 3)),
    ],
)
def test_splits_that_are_known(num_samples, own, most, expected) -> None:
    assert apportion(num_samples, own, most) == expected


@pytest.mark.parametrize(
    ("own", "most", "message"),
    [
        ([1, -1], None, "speeds: must be finite and 0 or more"),
        ([1, float("nan")], None, "speeds: must be finite"),
        ([1, float("inf")], None, "speeds: must be finite"),
        ([], None, "10 samples are more than workers take"),
        ([0, 0], None, "10 samples are more than workers take"),
        ([1, 1], [4, 5], "10 samples are more than workers take"),
    ],
)
def test_what_cannot_be_split(own, most, message) -> None:
    with pytest.raises(ValueError, match=message):
        apportion(10, own, most)
