"""How restless a profile's steps are, from the seconds of all ranks' rounds."""

import pytest

from paceline.measure.layers import unrest_of


def test_equal_steps_have_no_unrest() -> None:
    assert unrest_of([[[1.0, 9.0]] * 8, [[2.0, 7.0]] * 8]) == 0.0


def test_the_slowest_ranks_steps_count_and_no_exchange() -> None:
    # The slowest of each round: 4, 5, 6, 7, 8, with quartiles 5 and 7 around 6.
    first = [[own, 100.0] for own in (4.0, 1.0, 6.0, 1.0, 8.0)]
    second = [[own, 0.0] for own in (1.0, 5.0, 1.0, 7.0, 1.0)]
    assert unrest_of([first, second]) == pytest.approx(2 / 12)


def test_a_single_pause_is_no_unrest() -> None:
    assert unrest_of([[[1.0]] * 9 + [[50.0]]]) == 0.0
