"""Findings of a profile, with numbers computed by hand; its summary, page and refused settings."""

import json
import re

import pytest

from findings import by_topic, codes, numbers
from paceline.core.outcome import Insight
from paceline.records.profile import ProfileResult, WorkerMemoryRow
from paceline.records.result import read_result
from paceline.report import write_report
from paceline.report.markup import insights
from paceline.report.profile import largest_sentence, surplus_sentence
from paceline.report.terminal import console
from paceline.studies.profile.profile_ranks import spread
from paceline.studies.profile.profile_summary import insights_of, summary, tables
from paceline.studies.profile.profiled_steps import split, typical
from profiles import LARGEST, profile_result, write_profile
from refusals import refused, refused_field

HOSTILE = "<script>alert(1)</script>"
SHORT = {"load": 0.1, "update": 0.1, "exposed": 0.1, "idle": 0.1}  # beside 8 ms of computation


def said(**values) -> dict[str, Insight]:
    return by_topic(insights_of(profile_result(**values)))


@pytest.mark.parametrize(
    ("stages", "limit", "share"),
    [
        ({}, "computation", 76.4),
        ({"exposed": 30.0}, "communication", 75.5),  # 30 of 39.75 ms
        ({"update": 30.0}, "update", 77.4),
        ({"load": 30.0}, "loading", 76.0),
        ({"idle": 30.0}, "idle", 75.5),
        # Of 4 of 9.95 ms a twentieth passes between operators; 2.7 and 2.5 ms are other parts.
        ({"forward": 1.5, "backward": 2.5, "exposed": 2.7, "update": 2.5}, "computation", 38.2),
    ],
)
def test_what_limits_is_what_takes_most_of_a_step(stages, limit, share):
    found = said(stages=stages)["limit"]
    assert (found.code, numbers(found.sentence)) == (f"limit.{limit}", [pytest.approx(share, 0.01)])


def test_time_between_operators_or_kernels_is_no_computation():
    rows = [
        row.model_copy(update={"in_operators_s": 0.2 * row.torch_s})
        for row in profile_result().agreement
    ]
    assert said(agreement=tuple(rows))["limit"].code == "limit.calls"
    # Of a lane that is busy for 9 of 9.95 ms, kernels fill 0.9, or all.
    idle = said(agreement=(), kernels_s=0.9e-3)
    assert (idle["limit"].code, idle["change"].code) == ("limit.calls", "change.calls")
    assert said(agreement=(), kernels_s=9e-3)["limit"].code == "limit.computation"


@pytest.mark.parametrize(
    ("stages", "code", "told"),
    [
        # 30 of 39.75 ms are exposed: without them it would take 9.75 ms, 4.08 times as fast.
        ({"exposed": 30.0}, "communication", [9.75, 4.08]),
        # 4.15 of 12.45 ms; without it 8.3 ms are left.
        (SHORT | {"update": 4.15}, "update", [8.3, 1.5]),
        (SHORT | {"load": 4.15}, "loading", [8.3, 1.5]),
        (SHORT | {"idle": 4.15}, "idle", [8.3, 1.5]),
        # Worth it from a tenth: of 9.3 ms and not of 9.2 ms, and if nothing else costs more.
        (SHORT | {"update": 1.0}, "update", [8.3, 1.12]),
        (SHORT | {"update": 0.9}, "computation", None),
        (SHORT | {"update": 4.15, "exposed": 5.0}, "communication", None),
        ({"update": 0.1, "load": 0.1}, "computation", None),
    ],
)
def test_the_first_change_is_the_largest_cost_that_is_a_tenth_of_a_step(stages, code, told):
    found = said(stages=stages)["change"]
    assert found.code == f"change.{code}"
    if code == "computation":
        assert found.figures[0][0] == "layer first"
    assert told is None or numbers(found.sentence) == told


def test_memory_is_what_grows_with_the_batch_or_what_does_not():
    found = said()["memory"]
    assert (found.code, numbers(found.sentence)) == ("memory.features", [5.86, 2.93, 2.0])
    few = profile_result().memory.model_copy(update={"features": 2900})
    found = said(memory=few)["memory"]  # nearly as much as the rest: twice the batch is not free
    assert (found.code, numbers(found.sentence)) == ("memory.parameters", [2.83, 2.93, 2.83])


TRIED = (*LARGEST.attempts, LARGEST.attempts[0].model_copy(update={"batch_size": 2}))


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({}, [1.0, 96]),
        ({"complete": False}, [1.0, 96]),
        ({"batch_size": 0, "attempts": TRIED}, [1.0, 2]),
        ({"batch_size": 0, "attempts": TRIED, "complete": False}, [1.0, 2]),
    ],
)
def test_the_largest_batch_is_said_as_far_as_it_is_known(facts, told):
    found = LARGEST.model_copy(update=facts)
    sentence = largest_sentence(found)
    assert numbers(sentence) == told
    assert ("deadline" in sentence) is not found.complete
    assert sentence in said(largest=found)["memory"].sentence
    assert sentence in summary(profile_result(largest=found), "runs/x")


def test_a_busy_machine_is_said_before_all_else():
    assert codes(insights_of(profile_result(unrest=0.15))) == [
        *("limit.computation", "change.computation", "memory.features"),
    ]
    busy, *_ = insights_of(profile_result(unrest=0.25))
    assert (busy.code, busy.topic, numbers(busy.sentence)) == ("machine.busy", "machine", [25])


def test_sums_and_errors_follow_from_the_rows():
    result = profile_result(recorded_typical_s=0.0125)
    assert result.stages_s == pytest.approx(0.010)  # hidden communication adds nothing
    assert result.stages_error == pytest.approx(0.010 / 0.0125 - 1)
    assert result.surplus_nbytes == 1000 - 800
    assert result.memory.error == pytest.approx(-0.05)
    assert [row.error for row in result.agreement] == pytest.approx([0.02, 0.02])


def lines(result: ProfileResult) -> dict[str, str]:
    """The lines of the summary, by their names."""
    return {line[:10].strip(): line[11:] for line in summary(result, "runs/x").splitlines()}


@pytest.mark.parametrize(
    ("cost", "typical_s", "told"),
    [(0.02, 0.0125, [2, -20]), (-0.01, 0.01, [-1, 0]), (251.983, 1e-4, [253, 100])],
)
def test_recording_is_said_with_what_it_costs(cost, typical_s, told):
    result = profile_result(cost=cost, recorded_typical_s=typical_s)
    assert numbers(lines(result)["recording"]) == told


@pytest.mark.parametrize(("measured", "error"), [(10_000, -5.0), (100, 95.0)])
def test_memory_is_measured_beside_predicted(measured: int, error: float):
    memory = profile_result().memory.model_copy(update={"measured": measured})
    assert numbers(lines(profile_result(memory=memory))["memory"])[1:] == [9.28, error]


@pytest.mark.parametrize(
    ("more", "surplus", "told"),
    [
        ((300, 100), 200, [0, 200, 1]),
        ((100, 300), -200, [0, 200, 1]),
        ((300, 200, 100), 150, [0, 150]),  # than the others on average
        ((7, 7), 0, [0, 1]),
        ((7,), None, None),
    ],
)
def test_worker_0_needs_more_or_less_than_the_others(tmp_path, more, surplus, told):
    workers = [WorkerMemoryRow(worker=i, before_nbytes=1, training_nbytes=1 + own)
               for i, own in enumerate(more)]  # fmt: skip
    result = profile_result(workers=tuple(workers))
    sentence = surplus_sentence(result)
    assert result.surplus_nbytes == surplus
    assert (sentence and numbers(sentence)) == told
    assert lines(result).get("surplus") == sentence
    page = write_report(write_profile(tmp_path / "run", result)).read_text()
    assert sentence is None or sentence in page


def test_a_page_says_changes_beyond_tenfold_as_times(tmp_path):
    def shown(name: str, factor: float) -> str:
        usual = profile_result()
        rows = (one.model_copy(update={"ours_s": factor * one.torch_s}) for one in usual.agreement)
        memory = usual.memory.model_copy(update={"predicted": round(factor * 10_000)})
        errors = {"cost": factor - 1, "recorded_typical_s": usual.stages_s / factor}
        result = profile_result(agreement=tuple(rows), memory=memory, **errors)
        return write_report(write_profile(tmp_path / name, result)).read_text()

    # Of recording, of the stages' sum, of two phases, and of memory.
    assert shown("small", 1.25).count("+25.0 %") == shown("large", 25.0).count("25.0 times") == 5


def test_a_page_holds_all_of_it_and_no_markup_of_others(tmp_path):
    result = profile_result()
    hostile = result.layers[0].model_copy(update={"name": HOSTILE})
    operator = result.operators[0].model_copy(update={"name": HOSTILE})
    settings = result.settings.model_copy(update={"data": "digits"})
    result = profile_result(
        layers=(hostile,), operators=(operator,), largest=LARGEST, settings=settings
    )
    result = result.model_copy(update={"insights": tuple(insights_of(result))})
    folder = write_profile(tmp_path / "run", result)
    assert read_result(folder) == result
    page = write_report(folder).read_text()
    assert HOSTILE not in page
    assert insights(result.insights) in page
    assert len(re.findall("<h2>", page)) >= 7
    for text in ("torch.profiler", "out of memory", "processor", "on digits"):
        assert text in page


def test_a_terminal_shows_it():
    result = profile_result(largest=LARGEST)
    out = console(quiet=False)
    with out.capture() as shown:
        for table in tables(result):
            out.print(table)
    assert "aten::mm" in shown.get()
    assert "exposed" in shown.get()
    assert numbers(lines(result)["step"])[:3] == [10.0, 9.0, 11.0]


def test_a_damaged_result_is_told_by_its_field(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"kind": "profile"}))
    with refused(tmp_path / "result.json") as caught:
        read_result(tmp_path)
    assert caught.value.problem.startswith("id: ")


def test_steps_go_into_blocks_that_take_turns():
    assert [split(steps) for steps in (4, 9, 20, 21, 1000)] == [
        *((2, 2), (2, 5), (5, 4), (5, 5), (5, 200)),
    ]


def test_the_typical_step_is_the_mean_of_the_middle_half():
    assert typical([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]) == (2 + 3 + 4 + 5) / 4
    assert typical([1.0, 2.0]) == 1.5
    assert list(spread([1.0, 2.0, 3.0, 4.0, 5.0]).model_dump().values()) == [3.0, 2.0, 4.0]


def test_more_workers_than_there_are_cores_are_refused_before_any_starts(line):
    line("profile", "lenet5", "--workers", 1000, "--batch-size", 1000)
    assert (line.code, line.out, refused_field(line.err)) == (2, "", "workers")
