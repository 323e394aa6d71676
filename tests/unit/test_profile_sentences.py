"""What a profile says: each sentence where it is right, and where it would be wrong."""

import pytest

from paceline.records.profile import ProfileResult, WorkerMemoryRow
from paceline.report import write_report
from paceline.report.profile import surplus_sentence
from paceline.studies.profile.profile_summary import insights_of, summary
from profiles import profile_result, write_profile

SHORT = {"load": 0.1, "update": 0.1, "exposed": 0.1, "idle": 0.1}  # beside 8 ms of computation


def change(stages: dict[str, float]) -> str:
    found = {row.topic: row.sentence for row in insights_of(profile_result(stages=stages))}
    return found["change"]


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (
            "update",
            "First take larger batches, which need fewer updates: without the weight update",
        ),
        ("load", "First load beside training, or prepare the samples beforehand: without loading"),
        ("idle", "First find in the timeline what happens in the gaps: without idle time"),
    ],
)
def test_what_to_change_first_is_the_largest_cost_that_is_a_tenth_of_a_step(part, sentence) -> None:
    # 4.15 of 12.45 ms; without it 8.3 ms are left.
    assert change(SHORT | {part: 4.15}) == (
        f"{sentence} a step would take 8.30 ms, at best 1.50 times as fast."
    )
    assert change(SHORT | {part: 1.0}).startswith(sentence)  # of 9.3 ms
    for too_little in (SHORT | {part: 0.9}, SHORT | {part: 4.15, "exposed": 5.0}):
        assert not change(too_little).startswith(sentence)  # of 9.2 ms; less than another


def lines(result: ProfileResult) -> dict[str, str]:
    """The lines of the summary, by their names."""
    return {line[:10].strip(): line[11:] for line in summary(result, "runs/x").splitlines()}


@pytest.mark.parametrize(
    ("cost", "typical_s", "says"),
    [
        (0.02, 0.0125, "+2.0 % of a step; the stages' sum is -20.0 % off"),
        (-0.01, 0.01, "-1.0 % of a step; the stages' sum is +0.0 % off"),
        (251.983, 1e-4, "253 times of a step; the stages' sum is 100 times off"),
    ],
)
def test_recording_is_said_with_what_it_costs(cost, typical_s, says) -> None:
    assert lines(profile_result(cost=cost, recorded_typical_s=typical_s))["recording"] == says


@pytest.mark.parametrize(("measured", "error"), [(10_000, "-5.0 %"), (100, "95.0 times")])
def test_memory_is_measured_beside_predicted(measured: int, error: str) -> None:
    memory = profile_result().memory.model_copy(update={"measured": measured})
    found = lines(profile_result(memory=memory))["memory"]
    assert f"of tensors at most, predicted 9.28 KiB ({error})" in found


def taking(*more: int) -> ProfileResult:
    """A profile whose workers need so many bytes more in training than before."""
    rows = enumerate(more)
    workers = (
        WorkerMemoryRow(worker=rank, before_nbytes=100, training_nbytes=100 + own)
        for rank, own in rows
    )
    return profile_result(workers=tuple(workers))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((300, 100), "Worker 0 needs 200 B more than worker 1"),
        ((100, 300), "Worker 0 needs 200 B less than worker 1"),
        ((300, 200, 100), "Worker 0 needs 150 B more than the others on average"),
        ((7, 7), "Worker 0 needs as much memory as worker 1"),
        ((7,), None),
    ],
)
def test_worker_0_needs_more_or_less_than_the_others(tmp_path, more, says) -> None:
    result = taking(*more)
    assert surplus_sentence(result) == says
    assert lines(result).get("surplus") == says
    page = write_report(write_profile(tmp_path / "run", result)).read_text()
    assert ("Worker 0 needs" in page) is (says is not None)
    assert says is None or f"{says}." in page


def test_a_page_says_changes_beyond_tenfold_as_times(tmp_path) -> None:
    def shown(name: str, factor: float) -> str:
        usual = profile_result()
        rows = (one.model_copy(update={"ours_s": factor * one.torch_s}) for one in usual.agreement)
        memory = usual.memory.model_copy(update={"predicted": round(factor * 10_000)})
        errors = {"cost": factor - 1, "recorded_typical_s": usual.stages_s / factor}
        result = profile_result(agreement=tuple(rows), memory=memory, **errors)
        return write_report(write_profile(tmp_path / name, result)).read_text()

    small, large = shown("small", 1.25), shown("large", 25.0)
    # Of recording, of the stages' sum, of two phases, and of memory.
    assert small.count("+25.0 %") == large.count("25.0 times") == 5
    assert "2,400.0 %" not in large


@pytest.mark.parametrize(
    ("data", "said"), [(None, "profiled, "), ("digits", "profiled on digits, ")]
)
def test_the_page_names_the_data_that_were_asked_for(tmp_path, data, said) -> None:
    result = profile_result()
    settings = result.settings.model_copy(update={"data": data})
    write_profile(tmp_path, result.model_copy(update={"settings": settings}))
    assert f"{said}strategy" in write_report(tmp_path).read_text()
