"""The chunk size that is predicted from real steps, against a simulation of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.chunks import ChunkTimes, LearnedSearch, candidates, chunks, predict

MODELS = st.integers(2, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 10**7), min_size=n, max_size=n, unique=True),
        st.lists(st.floats(1e-4, 1e-1), min_size=n, max_size=n),
    )
)


def exchanged(sizes, gaps, chunk, latency_s, s_per_byte, start=5.0):
    """Each chunk is summed when its layers are ready and the one before is done."""
    ready, now = [], start
    for gap in gaps:
        now += gap
        ready.append(now)
    times, end = [], 0.0
    for members in chunks(len(sizes), chunk):
        nbytes, at = sum(sizes[i] for i in members), ready[members[-1]]
        end = max(at, end) + latency_s + nbytes * s_per_byte
        times.append(ChunkTimes(nbytes, at, end))
    return times


@given(MODELS, st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_steps_of_other_sizes_are_as_long_as_simulated_ones(model, latency_s, s_per_byte):
    sizes, gaps = model
    steps = [exchanged(sizes, gaps, 1, latency_s, s_per_byte, start) for start in (5.0, 9.0)]
    found = predict(1.0, steps, candidates(len(sizes)))
    last = {
        size: exchanged(sizes, gaps, size, latency_s, s_per_byte)[-1].summed_s for size in found
    }
    for size, seconds in found.items():
        assert seconds == pytest.approx(1.0 + last[size] - last[1], abs=1e-6)


def test_without_times_all_sizes_are_alike():
    assert predict(0.5, [], (1, 2, 3)) == {1: 0.5, 2: 0.5, 3: 0.5}


def test_layers_alone_come_first_and_then_the_size_with_the_best_prediction():
    """Forty layers that are ready at once: latency is all that counts, and few chunks are best."""
    search = LearnedSearch(40, interval=2, learning=3)
    step = exchanged([1000 + i for i in range(40)], [1e-6] * 40, 1, 1e-3, 1e-12)
    for _ in range(3):
        assert (search.chunk, search.done, search.trials, search.interval) == (1, False, (), 3)
        search.record(0.1, step)
    fewest = min(candidates(40), key=lambda size: len(chunks(40, size)))
    assert search.chunk == fewest
    assert search.interval == 2
    for _ in range(100):
        search.record(0.05 if search.chunk == fewest else 0.06)
    assert search.done
    assert search.chunk == fewest
    assert search.trials[0].predicted_s == pytest.approx(
        0.1 - 1e-3 * (40 - len(chunks(40, fewest))), abs=1e-4
    )


def test_a_single_layer_needs_no_search():
    assert LearnedSearch(1).done


@pytest.mark.parametrize("wrong", [(0, 10, 3), (3, 0, 3), (3, 10, 0)])
def test_numbers_that_are_not_positive_are_refused(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        LearnedSearch(*wrong)
