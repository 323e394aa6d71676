"""The search for the largest batch, whatever an attempt is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.studies.profile.largest_batch import GaveUp, largest


@given(st.integers(0, 5000), st.integers(1, 10_000), st.integers(1, 4000))
def test_the_search_finds_what_fits_to_a_sixteenth(limit: int, first: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        assert 1 <= size <= most
        assert size not in tried
        tried.append(size)
        return size <= limit

    found, complete = largest(fits, first, most)
    true = min(limit, most)
    assert complete
    assert found <= true <= found + found // 16
    assert len(tried) <= 30


def test_an_attempt_without_an_answer_ends_the_search() -> None:
    def fits(size: int) -> bool:
        if size > 100:
            raise GaveUp
        return True

    assert largest(fits, 10, 10**6) == (80, False)
    assert largest(fits, 200, 10**6) == (0, False)


@pytest.mark.parametrize("most", [1, 7])
def test_all_that_may_be_tried_can_fit(most: int) -> None:
    assert largest(lambda size: True, 3, most) == (most, True)
