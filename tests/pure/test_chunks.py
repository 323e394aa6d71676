"""Chunks of layers, and three searches for their size: Algorithm 1, predicted, learned."""

from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.chunks import (
    ChunkTimes,
    ChunkTuner,
    LearnedSearch,
    PredictedSearch,
    RuntimeSearch,
    candidates,
    chunks,
    predict,
)

# Sums of whole numbers are exact, so that ties do not depend on the order of summation.
SECONDS = st.integers(1, 20).map(float)


@pytest.mark.parametrize(
    ("num_layers", "size", "expected"),
    [
        (6, 1, [[6], [5], [4], [3], [2], [1]]),
        (6, 2, [[6, 5], [4, 3], [2], [1]]),  # 2 divides 6: the last 2 layers are single
        (6, 4, [[6, 5, 4, 3], [2], [1]]),  # 4 does not divide 6: the remainder is single
        (7, 3, [[7, 6, 5], [4, 3, 2], [1]]),
        (3, 3, [[3], [2], [1]]),  # never all layers in one chunk
        (3, 9, [[3], [2], [1]]),
        (1, 1, [[1]]),
    ],
)
def test_chunks_follow_section_4_2(num_layers, size, expected):
    # The paper numbers layers from l, the first in backward, to 1.
    assert [[num_layers - i for i in part] for part in chunks(num_layers, size)] == expected


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [(1, (1,)), (4, (1, 2, 3)), (156, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128))],
)
def test_candidates(num_layers: int, sizes: tuple[int, ...]):
    assert candidates(num_layers) == sizes


Times = Callable[[int, int], float]  # seconds of an iteration, by chunk size and number


def run(tuner: ChunkTuner, seconds: Times, iterations: int) -> tuple[list[int], int | None]:
    """Return the chunk size of each iteration, and the iteration that ended the search."""
    used, done_after = [], None
    for iteration in range(1, iterations + 1):
        used.append(tuner.chunk)
        tuner.record(seconds(tuner.chunk, iteration))
        if tuner.done and done_after is None:
            done_after = iteration
    return used, done_after


def algorithm_1(n: int, step: int, range_: int, seconds: Times, interval: int):
    """Run the paper's pseudo-code line by line, with a simulated clock."""
    used, done_after, clock = [], None, 0.0
    chunk, best_chunk, lapse_min = 1, 1, float("inf")
    it, done = 1, False
    start_time = clock
    while it <= n:
        used.append(chunk)
        clock += seconds(chunk, it)
        if it % interval == 0 and not done:
            if chunk >= best_chunk + step * range_:
                chunk = best_chunk
                done = True
                done_after = it
            else:
                end_time = clock
                lapse = end_time - start_time
                if lapse < lapse_min:
                    lapse_min = lapse
                    best_chunk = chunk
                if chunk < step:  # noqa: SIM108 - as in the paper
                    chunk = chunk + 1
                else:
                    chunk = chunk + step
                start_time = clock
        it = it + 1
    return used, done_after


@given(
    step=st.integers(1, 12),
    range_=st.integers(1, 6),
    interval=st.integers(1, 4),
    times=st.lists(SECONDS, min_size=1, max_size=30),
)
def test_runtime_search_is_algorithm_1(step: int, range_: int, interval: int, times: list[float]):
    def seconds(chunk: int, iteration: int) -> float:
        return times[(chunk * 7 + iteration) % len(times)]

    found = run(RuntimeSearch(10_000, step, range_, interval), seconds, 60 * interval)
    assert found == algorithm_1(60 * interval, step, range_, seconds, interval)


def test_the_papers_account_of_figure_5a():
    """Section 5.3: best with 9 layers at iteration 90; "it ran six more times", until 150."""
    tuner = RuntimeSearch(152, step=10, range=5)
    used, done_after = run(tuner, lambda chunk, _: 1 + abs(chunk - 9), 200)
    assert done_after == 150
    assert (used[80:90], used[150:]) == ([9] * 10, [9] * 50)
    assert used[90:150:10] == [10, 20, 30, 40, 50, 60]
    expected = [(size, None, 1 + abs(size - 9)) for size in (*range(1, 11), 20, 30, 40, 50)]
    assert list(tuner.trials) == expected  # in seconds per step


@given(num_layers=st.integers(1, 40), step=st.integers(1, 12), times=st.lists(SECONDS, min_size=1))
def test_runtime_search_tries_nothing_twice(num_layers: int, step: int, times: list[float]):
    """`range` is too large for the paper's own stopping rule."""
    tuner = RuntimeSearch(num_layers, step, range=100, interval=2)
    used, _ = run(tuner, lambda chunk, _: times[chunk % len(times)], 2 * num_layers)
    assert tuner.done
    groupings = [tuple(chunks(num_layers, trial.chunk)) for trial in tuner.trials]
    assert len(set(groupings)) == len(groupings)
    assert set(used) == {trial.chunk for trial in tuner.trials}
    assert tuner.chunk == min(tuner.trials, key=lambda trial: trial.measured_s).chunk


@st.composite
def unimodal(draw: st.DrawFn) -> dict[int, float]:
    """Generate seconds by chunk size that strictly fall to a minimum of 1.0, then rise."""
    sizes = candidates(draw(st.integers(1, 200)))
    least, power = draw(st.integers(0, len(sizes) - 1)), draw(st.sampled_from([0.3, 1, 2]))
    slopes = draw(st.integers(1, 50)), draw(st.integers(1, 50))
    return {size: 1.0 + slopes[i > least] * abs(i - least) ** power for i, size in enumerate(sizes)}


@given(unimodal())
def test_a_right_prediction_is_confirmed_in_few_trials(seconds: dict[int, float]):
    tuner = PredictedSearch(seconds, interval=3)
    far_and_near = (len(seconds) + 2) // 3 + 2
    used, _ = run(tuner, lambda chunk, _: seconds[chunk], 3 * far_and_near)
    assert tuner.done
    assert seconds[tuner.chunk] == 1.0
    assert used[0] == tuner.chunk
    assert all(trial.predicted_s == trial.measured_s for trial in tuner.trials)


@given(seconds=unimodal(), data=st.data())
def test_a_wrong_prediction_does_not_hide_the_best(seconds: dict[int, float], data: st.DataObject):
    predicted = {size: data.draw(SECONDS) for size in seconds}
    tuner = PredictedSearch(predicted, interval=1)
    run(tuner, lambda chunk, _: seconds[chunk], len(seconds))
    assert tuner.done
    assert seconds[tuner.chunk] == 1.0


def test_a_prediction_of_the_wrong_shape_does_not_hide_a_second_valley():
    """Times of a rehearsal whose prediction assumed ten times the cost of a chunk."""
    seconds = {1: 195, 2: 168, 4: 182, 8: 189, 16: 189, 32: 190, 64: 200, 96: 196, 128: 203}
    predicted = dict(zip(seconds, [528, 356, 271, 232, 211, 218, 248, 210, 246], strict=True))
    tuner = PredictedSearch({size: float(s) for size, s in predicted.items()}, interval=1)
    run(tuner, lambda chunk, _: float(seconds[chunk]), len(seconds))
    assert (tuner.done, tuner.chunk) == (True, 2)


@given(
    predicted=st.dictionaries(st.integers(1, 50), SECONDS, min_size=1, max_size=12),
    interval=st.integers(1, 5),
    times=st.lists(SECONDS, min_size=1, max_size=40),
)
def test_with_noise_the_search_ends_in_time_at_the_smallest_median(predicted, interval, times):
    tuner = PredictedSearch(predicted, interval)
    by_chunk: dict[int, list[float]] = {}
    for iteration in range(interval * len(predicted)):
        if not tuner.done:
            value = times[(tuner.chunk + iteration) % len(times)]
            by_chunk.setdefault(tuner.chunk, []).append(value)
            tuner.record(value)
    assert tuner.done
    measured = {chunk: median(values) for chunk, values in by_chunk.items()}
    assert [(t.chunk, t.measured_s) for t in tuner.trials] == list(measured.items())
    assert measured[tuner.chunk] == min(measured.values())
    assert tuner.trials[0].predicted_s == min(predicted.values())


@pytest.mark.parametrize("tuner", [RuntimeSearch(1, interval=2), PredictedSearch({1: 1.0}, 2)])
def test_a_single_candidate_is_chosen_after_one_interval(tuner: ChunkTuner):
    _, done_after = run(tuner, lambda *_: 1.0, 5)
    assert (done_after, tuner.chunk, len(tuner.trials)) == (2, 1, 1)
    assert LearnedSearch(1).done


MODELS = st.lists(
    st.tuples(st.integers(1, 10**7), st.floats(1e-4, 1e-1)),  # bytes, seconds of backward
    min_size=2,
    max_size=40,
    unique_by=lambda layer: layer[0],
)


def exchanged(layers, chunk, latency_s, s_per_byte, start=5.0):
    """Simulate sums of chunks, each after its last layer and the previous chunk."""
    ready, now = [], start
    for _, gap in layers:
        now += gap
        ready.append(now)
    times, end = [], 0.0
    for members in chunks(len(layers), chunk):
        nbytes, at = sum(layers[i][0] for i in members), ready[members[-1]]
        end = max(at, end) + latency_s + nbytes * s_per_byte
        times.append(ChunkTimes(nbytes, at, end))
    return times


@given(MODELS, st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_predicted_steps_of_other_sizes_equal_simulated_steps(layers, latency_s, s_per_byte):
    assert predict(0.5, [], (1, 2, 3)) == {1: 0.5, 2: 0.5, 3: 0.5}  # no measured chunks
    steps = [exchanged(layers, 1, latency_s, s_per_byte, start) for start in (5.0, 9.0)]
    found = predict(1.0, steps, candidates(len(layers)))
    last = {size: exchanged(layers, size, latency_s, s_per_byte)[-1].summed_s for size in found}
    for size, seconds in found.items():
        assert seconds == pytest.approx(1.0 + last[size] - last[1], abs=1e-6)


def test_single_layers_are_measured_first_and_then_the_best_prediction_is_tried():
    """Forty layers are ready almost at once, so latency dominates and few chunks are best."""
    search = LearnedSearch(40, interval=2, learning=3)
    step = exchanged([(1000 + i, 1e-6) for i in range(40)], 1, 1e-3, 1e-12)
    for _ in range(3):
        assert (search.chunk, search.done, search.trials, search.interval) == (1, False, (), 3)
        search.record(0.1, step)
    fewest = min(candidates(40), key=lambda size: len(chunks(40, size)))
    assert (search.chunk, search.interval) == (fewest, 2)
    for _ in range(100):
        search.record(0.05 if search.chunk == fewest else 0.06)
    assert (search.chunk, search.done) == (fewest, True)
    expected = 0.1 - 1e-3 * (40 - len(chunks(40, fewest)))
    assert search.trials[0].predicted_s == pytest.approx(expected, abs=1e-4)
