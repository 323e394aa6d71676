"""The searches for a chunk size: Algorithm 1 to the letter, and the one that starts predicted."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.chunks import ChunkTuner, PredictedSearch, RuntimeSearch, candidates, chunks

# Whole numbers, whose sums are exact: a tie is a tie in any order of summation.
SECONDS = st.integers(1, 20).map(float)
MANY_LAYERS = 10_000


class Account(NamedTuple):
    """What a training run with a tuner looked like."""

    used: list[int]  # the chunk size of each iteration
    done_after: int | None


def run(tuner: ChunkTuner, seconds: Callable[[int, int], float], iterations: int) -> Account:
    """Train; an iteration takes `seconds(chunk, iteration)`."""
    used, done_after = [], None
    for iteration in range(1, iterations + 1):
        used.append(tuner.chunk)
        tuner.record(seconds(tuner.chunk, iteration))
        if tuner.done and done_after is None:
            done_after = iteration
    return Account(used, done_after)


def algorithm_1(
    n: int, step: int, range_: int, seconds: Callable[[int, int], float], interval: int
) -> Account:
    """The pseudo-code of the paper, line for line, with a clock that the iterations move."""
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
    return Account(used, done_after)


@given(
    step=st.integers(1, 12),
    range_=st.integers(1, 6),
    interval=st.integers(1, 4),
    times=st.lists(SECONDS, min_size=1, max_size=30),
)
def test_runtime_search_is_algorithm_1(step: int, range_: int, interval: int, times: list[float]):
    def seconds(chunk: int, iteration: int) -> float:
        return times[(chunk * 7 + iteration) % len(times)]

    iterations = 60 * interval
    tuner = RuntimeSearch(MANY_LAYERS, step, range_, interval)
    assert run(tuner, seconds, iterations) == algorithm_1(
        iterations, step, range_, seconds, interval
    )


def around(best: int) -> Callable[[int, int], float]:
    return lambda chunk, _: 1 + abs(chunk - best)


def test_the_papers_account_of_figure_5a():
    """Section 5.3: best with 9 layers at iteration 90; "it ran six more times", until 150."""
    tuner = RuntimeSearch(152, step=10, range=5)
    account = run(tuner, around(9), 200)
    assert account.used[80:90] == [9] * 10
    assert account.done_after == 150
    assert account.used[90:150:10] == [10, 20, 30, 40, 50, 60]
    assert account.used[150:] == [9] * 50
    assert [trial.chunk for trial in tuner.trials] == [*range(1, 11), 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("range_", "best", "intervals"),
    [(5, 3, 10), (5, 5, 10), (10, 20, 18), (15, 3, 20), (15, 10, 21)],
)
def test_the_papers_account_of_figure_5b(range_: int, best: int, intervals: int):
    """Step 5: "at most 21 iterations", which can only be intervals of ten."""
    tuner = RuntimeSearch(152, step=5, range=range_)
    assert run(tuner, around(best), 300).done_after == 10 * intervals
    assert tuner.chunk == best


@given(num_layers=st.integers(1, 40), step=st.integers(1, 12), times=st.lists(SECONDS, min_size=1))
def test_runtime_search_tries_nothing_twice(num_layers: int, step: int, times: list[float]):
    """The paper's own stop never comes here: range is too large."""
    tuner = RuntimeSearch(num_layers, step, range=100, interval=2)
    account = run(tuner, lambda chunk, _: times[chunk % len(times)], 2 * num_layers)
    assert tuner.done
    groupings = [tuple(chunks(num_layers, trial.chunk)) for trial in tuner.trials]
    assert len(set(groupings)) == len(groupings)
    assert set(account.used) == {trial.chunk for trial in tuner.trials}
    assert tuner.chunk == min(tuner.trials, key=lambda trial: trial.measured_s).chunk


def test_trials_are_seconds_per_step():
    tuner = RuntimeSearch(3, interval=4)
    run(tuner, lambda chunk, iteration: chunk + iteration % 2, 8)
    assert tuner.trials == ((1, None, 1.5), (2, None, 2.5))


@st.composite
def unimodal(draw: st.DrawFn) -> dict[int, float]:
    """Chunk sizes and seconds that fall strictly to a least one, then rise strictly."""
    sizes = candidates(draw(st.integers(1, 200)))
    left = sorted(draw(st.sets(st.integers(2, 1000), max_size=len(sizes) - 1)), reverse=True)
    num_right = len(sizes) - 1 - len(left)
    right = sorted(draw(st.sets(st.integers(2, 1000), min_size=num_right, max_size=num_right)))
    return dict(zip(sizes, [*map(float, left), 1.0, *map(float, right)], strict=True))


@given(unimodal())
def test_a_right_prediction_is_confirmed_in_few_trials(seconds: dict[int, float]):
    tuner = PredictedSearch(seconds, interval=3)
    far_and_near = (len(seconds) + 2) // 3 + 2
    account = run(tuner, lambda chunk, _: seconds[chunk], 3 * far_and_near)
    assert tuner.done
    assert seconds[tuner.chunk] == 1.0
    assert account.used[0] == tuner.chunk
    assert all(trial.predicted_s == trial.measured_s for trial in tuner.trials)


@given(seconds=unimodal(), data=st.data())
def test_a_wrong_prediction_does_not_hide_the_least(seconds: dict[int, float], data: st.DataObject):
    predicted = {size: data.draw(SECONDS) for size in seconds}
    tuner = PredictedSearch(predicted, interval=1)
    run(tuner, lambda chunk, _: seconds[chunk], len(seconds))
    assert tuner.done
    assert seconds[tuner.chunk] == 1.0


def test_a_prediction_of_the_wrong_shape_does_not_hide_a_second_valley():
    """As in a rehearsal, where each chunk was taken to cost ten times of what it does."""
    seconds = {1: 195, 2: 168, 4: 182, 8: 189, 16: 189, 32: 190, 64: 200, 96: 196, 128: 203}
    predicted = dict(zip(seconds, [528, 356, 271, 232, 211, 218, 248, 210, 246], strict=True))
    tuner = PredictedSearch({size: float(s) for size, s in predicted.items()}, interval=1)
    run(tuner, lambda chunk, _: float(seconds[chunk]), len(seconds))
    assert tuner.done
    assert tuner.chunk == 2


@given(
    predicted=st.dictionaries(st.integers(1, 50), SECONDS, min_size=1, max_size=12),
    interval=st.integers(1, 5),
    times=st.lists(SECONDS, min_size=1, max_size=40),
)
def test_noise_neither_prolongs_the_search_nor_spoils_it(
    predicted: Mapping[int, float], interval: int, times: list[float]
):
    tuner = PredictedSearch(predicted, interval)
    by_chunk: dict[int, list[float]] = {}

    def seconds(chunk: int, iteration: int) -> float:
        value = times[(chunk + iteration) % len(times)]
        by_chunk.setdefault(chunk, []).append(value)
        return value

    for iteration in range(interval * len(predicted)):
        if not tuner.done:
            tuner.record(seconds(tuner.chunk, iteration))
    assert tuner.done
    measured = {chunk: median(values) for chunk, values in by_chunk.items()}
    assert [(t.chunk, t.measured_s) for t in tuner.trials] == list(measured.items())
    assert measured[tuner.chunk] == min(measured.values())
    assert tuner.trials[0].predicted_s == min(predicted.values())


def test_a_step_that_was_held_up_does_not_count():
    predicted = {1: 2.0, 2: 1.0, 3: 2.0}
    tuner = PredictedSearch(predicted, interval=3)
    run(tuner, lambda chunk, i: predicted[chunk] + (50.0 if i == 2 else 0.0), 9)
    assert tuner.done
    assert tuner.chunk == 2


@pytest.mark.parametrize("tuner", [RuntimeSearch(1, interval=2), PredictedSearch({1: 1.0}, 2)])
def test_a_single_choice_is_made_after_one_interval(tuner: ChunkTuner):
    account = run(tuner, lambda *_: 1.0, 5)
    assert (account.done_after, tuner.chunk, len(tuner.trials)) == (2, 1, 1)


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [
        (1, (1,)),
        (2, (1,)),
        (3, (1, 2)),
        (4, (1, 2, 3)),
        (8, (1, 2, 3, 4, 6)),
        (156, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)),
    ],
)
def test_candidates(num_layers: int, sizes: tuple[int, ...]):
    assert candidates(num_layers) == sizes


@pytest.mark.parametrize(
    "make",
    [
        lambda: RuntimeSearch(0),
        lambda: RuntimeSearch(8, step=0),
        lambda: RuntimeSearch(8, range=0),
        lambda: RuntimeSearch(8, interval=0),
        lambda: PredictedSearch({}),
        lambda: PredictedSearch({0: 1.0}),
        lambda: candidates(0),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object]):
    with pytest.raises(ValueError, match=r"positive|interval|predicted|candidates"):
        make()
