"""What `profile` measures: data that fit the model, blocks of steps, and the largest batch."""

from collections.abc import Iterable
from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from groups import group_of
from paceline.record.recorder import Recorder
from paceline.records.profile import ProfileSettings
from paceline.studies.profile.largest_batch import GaveUp, largest
from paceline.studies.profile.profiled_steps import measure, subject_of
from refusals import refused
from ticking import Ticking

FAILING = """
from torch import nn

class Failing(nn.Linear):
    def forward(self, x):
        raise ValueError("the third layer is not there")

def make():
    return Failing(64, 10)
"""
RECORDED_S = 10.0


def settings(**values: object) -> ProfileSettings:
    return ProfileSettings(**{"model": "lenet5"} | values)


@pytest.mark.parametrize("batch_size", [3, 64, 700])
def test_synthetic_samples_have_the_model_s_shape_and_make_whole_batches(batch_size: int) -> None:
    subject = subject_of(settings(batch_size=batch_size), group_of())
    assert subject.recipe.example(3).shape == (3, 1, 32, 32)
    assert set(subject.batches.global_sizes) == {batch_size}
    shares = subject.source(torch.device("cpu"))
    # It goes on after the last batch of the samples.
    for _ in range(len(subject.batches) + 1):
        assert next(shares).inputs.shape == (batch_size, 1, 32, 32)


def test_a_perceptron_without_widths_has_its_usual_ones() -> None:
    assert subject_of(settings(model="mlp"), group_of()).recipe.example(3).shape == (3, 54)


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch) -> None:
    with refused("batch_size"):  # more samples than the data have
        subject_of(settings(data="digits", batch_size=5000), group_of())
    with refused("workers"):
        subject_of(settings(workers=2), group_of())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_that_fails.py").write_text(FAILING)
    wanted = settings(model="model_that_fails:make", data="synthetic:64", batch_size=8)
    with refused("model model_that_fails:make") as caught:
        subject_of(wanted, group_of())
    assert "ValueError: the third layer is not there" in caught.value.problem


class Steps:
    """Stands in for a training: plain steps take these seconds in turns, recorded ones others."""

    def __init__(self, clock: Ticking, plain_s: Iterable[float]) -> None:
        self._clock, self._plain_s = clock, cycle(plain_s)
        self._is_recorded, self._number = False, 0
        self.model, self.replica = nn.Linear(1, 1), self

    def record(self, recorder: Recorder | None) -> None:
        self._is_recorded = recorder is not None

    def step(self, recorder: Recorder) -> None:
        # Recorded ones differ from each other in any case.
        self._number += 1
        recorded_s = RECORDED_S * (1 + self._number % 2)
        self._clock.now += recorded_s if self._is_recorded else next(self._plain_s)
        recorder.end_step()


@pytest.mark.parametrize(
    ("plain_s", "times", "unrest"), [((1.0,), 1, 0.0), ((1.0, 1.0, 2.0), 2, 0.5)]
)
def test_restless_plain_steps_have_both_kinds_taken_twice(plain_s, times, unrest) -> None:
    clock = Ticking()
    recorder = Recorder(clock, "cpu0", 0)
    found = measure(Steps(clock, plain_s), recorder, clock, group_of(), 20)
    assert found.unrest == pytest.approx(unrest)
    for blocks in (found.plain, found.recorded):
        assert [len(block) for block in blocks] == [4] * 5 * times
    assert len(found.spans) == len(found.timelines) == 5 * times
    assert {seconds for block in found.plain for seconds in block} == set(plain_s)
    assert min(min(block) for block in found.recorded) == RECORDED_S


@given(st.integers(0, 5000), st.integers(1, 10_000), st.integers(1, 4000))
def test_the_search_finds_the_largest_batch_to_a_sixteenth(limit: int, first: int, most: int):
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
    assert [largest(lambda size: True, 3, most) for most in (1, 7)] == [(1, True), (7, True)]
