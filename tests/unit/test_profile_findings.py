"""Profiles: measured steps, the largest batch, findings, summary and page."""

import html
from collections.abc import Iterable
from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from absent_ranks import group_of
from findings import numbers
from paceline.record.recorder import Recorder
from paceline.records.profile import ProfileResult, ProfileSettings, WorkerMemoryRow
from paceline.records.result import read_result
from paceline.report import write_report
from paceline.report.advice import findings, shown
from paceline.report.metrics import of_profile
from paceline.report.profile import largest_sentence, summary, surplus_sentence, tables
from paceline.report.terminal import console
from paceline.studies.profile.largest_batch import GaveUp, largest
from paceline.studies.profile.profile_ranks import spread
from paceline.studies.profile.profiled_steps import measure, split, subject_of, typical
from profiles import LARGEST, profile_result, write_profile
from refusals import refused
from ticking import Ticking

HOSTILE = "<script>alert(1)</script>"


def metrics(**values) -> dict[str, float]:
    return of_profile(profile_result(**values)).values


@pytest.mark.parametrize(
    ("stages", "metric", "share"),
    [
        ({}, "computing", 0.76),  # a twentieth of 8 ms passes between operators
        ({"forward": 0.0, "backward": 0.0}, "computing", 0.0),
        ({"exposed": 30.0}, "exposed", 0.755),  # 30 of 39.75 ms
        ({"update": 30.0}, "updating", 0.769),
        ({"load": 30.0}, "loading", 0.760),
        ({"idle": 30.0}, "idle", 0.755),
    ],
)
def test_metrics_are_shares_of_a_step(stages, metric, share):
    found = metrics(stages=stages)
    assert found[metric] == pytest.approx(share, abs=1e-3)
    parts = ("computing", "calls", "exposed", "updating", "loading", "idle")
    assert sum(found[part] for part in parts) == pytest.approx(1)


def test_time_between_operators_or_kernels_is_not_computing():
    between = tuple(
        row.model_copy(update={"in_operators_s": 0.2 * row.torch_s})
        for row in profile_result().agreement
    )
    # A lane is busy for 9 of 9.95 ms; kernels run for 0.9 ms of these, or for all.
    for facts, are_calls in (
        ({"agreement": between}, True),
        ({"agreement": (), "kernels_s": 0.9e-3}, True),
        ({"agreement": (), "kernels_s": 9e-3}, False),
    ):
        found = metrics(**facts)
        assert (found["calls"] > found["computing"]) is are_calls


@pytest.mark.parametrize(("features", "share"), [(6000, 2 / 3), (3000, 1 / 2)])
def test_feature_maps_are_a_share_of_the_memory(features, share):
    held = {"parameters": 1000, "gradients": 1000, "momentum": 1000, "features": features}
    found = metrics(memory=profile_result().memory.model_copy(update=held))
    assert found["feature_maps"] == pytest.approx(share)


TRIED = (*LARGEST.attempts, LARGEST.attempts[0].model_copy(update={"batch_size": 2}))


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("facts", "told"), [({}, [1.0, 96]), ({"batch_size": 0, "attempts": TRIED}, [1.0, 2])]
)
def test_the_largest_batch_is_reported_as_far_as_it_is_known(facts, told, complete):
    found = LARGEST.model_copy(update=facts | {"complete": complete})
    sentence = largest_sentence(found)
    assert numbers(sentence) == [*told, LARGEST.predicted]
    assert ("deadline" in sentence) is not complete
    assert sentence in summary(profile_result(largest=found), "runs/x")


MEMORY = profile_result().memory


def lines(result: ProfileResult) -> dict[str, str]:
    """Return the lines of the summary by name."""
    return {line[:10].strip(): line[11:] for line in summary(result, "runs/x").splitlines()}


@pytest.mark.parametrize(
    ("facts", "line", "told"),
    [
        ({"cost": 0.02, "recorded_typical_s": 0.0125}, "recording", [2, -20]),
        ({"cost": -0.01, "recorded_typical_s": 0.01}, "recording", [-1, 0]),
        ({"cost": 251.983, "recorded_typical_s": 1e-4}, "recording", [253, 100]),
        ({}, "memory", [9.77, 9.28, -5.0]),
        ({"memory": MEMORY.model_copy(update={"measured": 100})}, "memory", [100, 9.28, 95.0]),
        ({}, "step", [10.0, 9.0, 11.0]),
    ],
)
def test_the_summary_has_measurements_and_their_deviations(facts, line, told):
    assert numbers(lines(profile_result(**facts))[line])[: len(told)] == told


@pytest.mark.parametrize(
    ("more", "surplus", "told"),
    [
        ((300, 100), 200, [0, 200, 1]),
        ((100, 300), -200, [0, 200, 1]),
        ((300, 200, 100), 150, [0, 150]),  # more than the mean of the others
        ((7, 7), 0, [0, 1]),
        ((7,), None, None),
    ],
)
def test_the_memory_of_worker_0_is_compared_with_the_others(more, surplus, told):
    workers = [WorkerMemoryRow(worker=i, before_nbytes=1, training_nbytes=1 + own)
               for i, own in enumerate(more)]  # fmt: skip
    result = profile_result(workers=tuple(workers))
    sentence = surplus_sentence(result)
    assert result.surplus_nbytes == surplus
    assert (sentence and numbers(sentence)) == told
    assert lines(result).get("surplus") == sentence


def test_page_and_terminal_show_everything_and_escape_markup(tmp_path):
    usual = profile_result()
    hostile = (
        row.model_copy(update={"name": HOSTILE}) for row in (usual.layers[0], *usual.operators)
    )
    layer, operator = hostile
    settings = usual.settings.model_copy(update={"data": "digits"})
    result = profile_result(
        layers=(layer,), operators=(operator,), largest=LARGEST, settings=settings
    )
    found = findings(of_profile(result))
    result = result.model_copy(update={"findings": found})
    folder = write_profile(tmp_path / "run", result)
    assert read_result(folder) == result
    page = write_report(folder).read_text()
    assert HOSTILE not in page
    told = [html.escape(one) for one in shown(found)]
    told.append(html.escape(surplus_sentence(result)))
    for text in (*told, "torch.profiler", "out of memory", "processor", "on digits"):
        assert text in page
    alone = result.model_copy(update={"workers": result.workers[:1]})
    assert "worker 1" not in write_report(write_profile(tmp_path / "alone", alone)).read_text()
    out = console(quiet=False)
    with out.capture() as printed:
        out.print(*tables(usual))
    assert all(text in printed.get() for text in ("aten::mm", "exposed"))


def test_steps_are_split_into_blocks():
    assert [split(steps) for steps in (4, 9, 20, 21, 1000)] == [
        *((2, 2), (2, 5), (5, 4), (5, 5), (5, 200))
    ]


def test_the_typical_step_is_the_mean_of_the_middle_half():
    assert typical([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]) == (2 + 3 + 4 + 5) / 4
    assert typical([1.0, 2.0]) == 1.5
    assert list(spread([1.0, 2.0, 3.0, 4.0, 5.0]).model_dump().values()) == [3.0, 2.0, 4.0]


RECORDED_S = 10.0


def settings(**values: object) -> ProfileSettings:
    return ProfileSettings(**{"model": "lenet5"} | values)


@pytest.mark.parametrize(
    ("model", "batch_size", "shape"),
    [*(("lenet5", n, (1, 32, 32)) for n in (3, 700)), ("mlp", 64, (54,))],  # of its usual width
)
def test_synthetic_samples_have_the_model_s_shape_and_make_whole_batches(model, batch_size, shape):
    subject = subject_of(settings(model=model, batch_size=batch_size), group_of())
    assert set(subject.batches.global_sizes) == {batch_size}
    shares = subject.source(torch.device("cpu"))
    # The source begins again after the last batch.
    for _ in range(len(subject.batches) + 1):
        assert next(shares).inputs.shape == (batch_size, *shape)


def test_what_does_not_fit_is_refused() -> None:
    own = "paceline.training.models.networks:LeNet5"  # of images, not of 64 numbers
    for asked, field in (
        ({"data": "digits", "batch_size": 5000}, "batch_size"),  # more than all samples
        ({"model": own, "data": "synthetic:64", "batch_size": 8}, f"model {own}"),
    ):
        with refused(field) as caught:
            subject_of(settings(**asked), group_of())
    assert "RuntimeError: " in caught.value.problem


class Steps:
    """A training whose plain steps take the given seconds in turn; recorded steps take longer."""

    def __init__(self, clock: Ticking, plain_s: Iterable[float]) -> None:
        self._clock, self._plain_s = clock, cycle(plain_s)
        self._is_recorded, self._number = False, 0
        self.model, self.replica = nn.Linear(1, 1), self

    def record(self, recorder: Recorder | None) -> None:
        self._is_recorded = recorder is not None

    def step(self, recorder: Recorder) -> None:
        # Recorded steps always differ from each other.
        self._number += 1
        recorded_s = RECORDED_S * (1 + self._number % 2)
        self._clock.now += recorded_s if self._is_recorded else next(self._plain_s)
        recorder.end_step()


@pytest.mark.parametrize(
    ("plain_s", "times", "unrest"), [((1.0,), 1, 0.0), ((1.0, 1.0, 2.0), 2, 0.5)]
)
def test_both_kinds_of_steps_are_measured_twice_if_plain_ones_vary(plain_s, times, unrest) -> None:
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

    assert [largest(fits, first, 10**6) for first in (10, 200)] == [(80, False), (0, False)]
