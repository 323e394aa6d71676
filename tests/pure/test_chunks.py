from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.chunks import chunks


def in_paper_order(num_layers: int, size: int) -> list[list[int]]:
    """Chunks as the paper numbers layers: l is the first of the backward phase, 1 the last."""
    return [[num_layers - i for i in part] for part in chunks(num_layers, size)]


@pytest.mark.parametrize(
    ("num_layers", "size", "expected"),
    [
        (6, 1, [[6], [5], [4], [3], [2], [1]]),
        (6, 2, [[6, 5], [4, 3], [2], [1]]),  # size divides: the last 2 stay alone
        (6, 4, [[6, 5, 4, 3], [2], [1]]),  # size does not: those that remain
        (7, 3, [[7, 6, 5], [4, 3, 2], [1]]),
        (3, 3, [[3], [2], [1]]),  # never all together
        (3, 9, [[3], [2], [1]]),
        (1, 1, [[1]]),
    ],
)
def test_chunks_follow_section_4_2(num_layers, size, expected):
    assert in_paper_order(num_layers, size) == expected


@pytest.mark.parametrize(
    ("size", "together", "alone"), [(9, 16, 8), (20, 7, 12), (8, 18, 8), (1, 0, 152)]
)
def test_resnet_152_has_as_many_chunks_as_the_paper_says(size, together, alone):
    # l = 152: floor(l / k) chunks, or l / k - 1 where k divides l, and the rest alone.
    lengths = [len(part) for part in chunks(152, size)]
    assert lengths == [size] * together + [1] * alone


@given(st.integers(1, 200), st.integers(1, 250))
def test_every_layer_is_in_one_chunk_and_chunks_are_neighbours(num_layers, size):
    parts = chunks(num_layers, size)
    assert [i for part in parts for i in part] == list(range(num_layers))
    assert {len(part) for part in parts} <= {1, size}
    assert len(parts[-1]) == 1


@pytest.mark.parametrize("num_layers", range(2, 9))
def test_chunks_are_groupings_that_proposition_4_1_counts(num_layers):
    groupings = {
        cuts for k in range(1, num_layers) for cuts in combinations(range(1, num_layers), k)
    }
    assert len(groupings) == sum(comb(num_layers - 1, k) for k in range(1, num_layers))
    for size in range(1, num_layers + 2):
        cuts = tuple(part.stop for part in chunks(num_layers, size)[:-1])
        assert cuts in groupings


@pytest.mark.parametrize(("num_layers", "size"), [(0, 1), (1, 0), (-1, 2)])
def test_numbers_that_make_no_sense_are_refused(num_layers, size):
    with pytest.raises(ValueError, match="both must be positive"):
        chunks(num_layers, size)
