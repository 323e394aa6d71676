"""What a profile says, its page, and the command's bad input."""

import json

import pytest

from paceline.core.errors import InvalidInput
from paceline.records.result import read_result
from paceline.report import write_report
from paceline.report.markup import insights
from paceline.report.profile import largest_sentence
from paceline.report.terminal import console
from paceline.studies.profile.profile_ranks import spread
from paceline.studies.profile.profile_summary import insights_of, summary, tables
from paceline.studies.profile.profiled_steps import split, typical
from profiles import LARGEST, profile_result, write_profile

HOSTILE = "<script>alert(1)</script>"


def said(**values) -> dict[str, str]:
    return {row.topic: row.sentence for row in insights_of(profile_result(**values))}


@pytest.mark.parametrize(
    ("stages", "limit"),
    [
        ({}, "Computation limits"),
        ({"exposed": 30.0}, "Communication limits"),
        ({"update": 30.0}, "The weight update limits"),
        ({"load": 30.0}, "Loading limits"),
        ({"idle": 30.0}, "Nothing of the model limits"),
    ],
)
def test_what_limits_is_what_takes_most_of_a_step(stages, limit) -> None:
    assert said(stages=stages)["limit"].startswith(limit)


def test_the_largest_part_is_called_most_only_if_it_is() -> None:
    # Of 4 of 9.95 ms a twentieth passes between operators; 2.7 and 2.5 ms are other parts.
    spread_out = {"forward": 1.5, "backward": 2.5, "exposed": 2.7, "update": 2.5}
    assert said(stages=spread_out)["limit"] == (
        "Computation limits: forward and backward take 38.2 % of a step, more than any other part."
    )
    # 30 of 39.75 ms.
    assert said(stages={"exposed": 30.0})["limit"] == (
        "Communication limits: workers wait for gradients in 75.5 % of a step."
    )


def test_time_between_operators_is_no_computation() -> None:
    rows = [
        row.model_copy(update={"in_operators_s": 0.2 * row.torch_s})
        for row in profile_result().agreement
    ]
    assert said(agreement=tuple(rows))["limit"].startswith("Calls limit")


def test_time_between_the_kernels_of_a_gpu_is_no_computation() -> None:
    # Of a lane that is busy for 9 of 9.95 ms, kernels fill 0.9.
    idle = said(agreement=(), kernels_s=0.9e-3)
    assert idle["limit"].startswith("Calls limit: ")
    assert "larger batches" in idle["change"]
    full = said(agreement=(), kernels_s=9e-3)
    assert full["limit"].startswith("Computation limits")


def test_the_gain_of_a_change_is_what_a_step_is_without_it() -> None:
    # 30 of 39.75 ms are exposed: without them it would take 9.75 ms, 4.08 times as fast.
    change = said(stages={"exposed": 30.0})["change"]
    assert "9.75 ms" in change
    assert "4.08 times" in change
    # Of the 10 ms, no other part is worth a tenth once update and load are short.
    assert "layer first alone takes" in said(stages={"update": 0.1, "load": 0.1})["change"]


def test_memory_says_what_it_is_made_of() -> None:
    """Of 10,000 bytes at the peak neither is "most" where the rest is what backward works with."""
    sentence = said()["memory"]
    assert sentence.startswith("Feature maps take 5.86 KiB, parameters, gradients and momentum 2.9")
    assert sentence.endswith("2.0 times as much, which grows with the batch.")
    few = profile_result().memory.model_copy(update={"features": 2900})
    # Nearly as much as the rest: twice the batch is not for nothing.
    assert said(memory=few)["memory"].endswith(
        "whatever the batch: one twice as large needs at least 2.83 KiB more."
    )


def test_the_largest_batch_is_said_as_far_as_it_is_known() -> None:
    def last(**values) -> str:
        found = LARGEST.model_copy(update=values)
        result = profile_result(largest=found)
        sentence = said(largest=found)["memory"]
        assert largest_sentence(found) in sentence
        assert largest_sentence(found) in summary(result, "runs/x")
        return sentence

    assert last().endswith("The largest batch of a worker that fits into 1.00 GiB is 96.")
    assert last(complete=False).endswith("is at least 96; the search ended at a deadline.")
    tried = (*LARGEST.attempts, LARGEST.attempts[0].model_copy(update={"batch_size": 2}))
    none = last(batch_size=0, predicted=0, attempts=tried)
    assert none.endswith(
        "No batch was seen to fit into 1.00 GiB: 2 samples did not (out of memory)."
    )
    assert last(batch_size=0, attempts=tried, complete=False).endswith(
        "2 samples did not (out of memory); the search ended at a deadline."
    )


def test_a_busy_machine_is_said_before_all_else(tmp_path) -> None:
    result = profile_result(unrest=0.25)
    result = result.model_copy(update={"insights": tuple(insights_of(result))})
    first = result.insights[0]
    assert first.sentence == (
        "This machine is busy with other programs: half of the steps lie ±25 % around their "
        "median, and all that follows is as uncertain, although twice as many were taken."
    )
    assert first.sentence in summary(result, "runs/x")
    page = write_report(write_profile(tmp_path / "run", result)).read_text()
    assert first.sentence in page
    assert "machine" not in said(unrest=0.15)


def test_sums_and_errors_follow_from_the_rows() -> None:
    result = profile_result(recorded_typical_s=0.0125)
    assert result.stages_s == pytest.approx(0.010)  # hidden communication adds nothing
    assert result.stages_error == pytest.approx(0.010 / 0.0125 - 1)
    assert result.surplus_nbytes == 1000 - 800
    assert result.memory.error == pytest.approx(-0.05)
    assert [row.error for row in result.agreement] == pytest.approx([0.02, 0.02])
    assert profile_result(workers=result.workers[:1]).surplus_nbytes is None


def test_a_page_holds_all_of_it_and_no_markup_of_others(tmp_path) -> None:
    result = profile_result()
    hostile = result.layers[0].model_copy(update={"name": HOSTILE})
    operator = result.operators[0].model_copy(update={"name": HOSTILE})
    result = profile_result(layers=(hostile,), operators=(operator,), largest=LARGEST)
    result = result.model_copy(update={"insights": tuple(insights_of(result))})
    folder = write_profile(tmp_path / "run", result)
    assert read_result(folder) == result
    page = write_report(folder).read_text()
    assert HOSTILE not in page
    assert insights(result.insights) in page
    for text in (
        "Where a step goes",
        "Calls and waits",
        "Agreement with torch.profiler",
        "Largest batch",
        "out of memory",
        "processor",
        "Two steps in time",
    ):
        assert text in page


def test_a_terminal_shows_it(tmp_path) -> None:
    result = profile_result(largest=LARGEST)
    out = console(quiet=False)
    with out.capture() as shown:
        for table in tables(result):
            out.print(table)
        out.print(summary(result, "runs/x"), soft_wrap=True)
    for text in ("aten::mm", "exposed", "half lie in 9.00 ms to 11.0 ms", "fits into 1.00 GiB"):
        assert text in shown.get()


def test_a_damaged_result_is_told_by_its_field(tmp_path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"kind": "profile"}))
    with pytest.raises(InvalidInput, match=r"result\.json: id: Field required"):
        read_result(tmp_path)


def test_steps_go_into_blocks_that_take_turns() -> None:
    assert [split(steps) for steps in (4, 9, 20, 21, 1000)] == [
        (2, 2),
        (2, 5),
        (5, 4),
        (5, 5),
        (5, 200),
    ]


def test_the_typical_step_is_the_mean_of_the_middle_half() -> None:
    assert typical([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]) == (2 + 3 + 4 + 5) / 4
    assert typical([1.0, 2.0]) == 1.5
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]).model_dump() == {
        "median_s": 3.0,
        "lower_s": 2.0,
        "upper_s": 4.0,
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--steps", 0), "steps: Input should be greater than or equal to 4, not 0"),
        (("--strategy", "ring"), "strategy: 'ring' is not known"),
        (
            ("--strategy", "hogbatch"),
            "strategy: 'hogbatch' can be trained with and planned, but its exchange",
        ),
        (("--workers", 0), "workers: Input should be greater than or equal to 1, not 0"),
        (("--workers", 1000), "workers: 1000 do not fit on"),
        (("--memory", "8GiB"), "memory: goes only with largest_batch"),
        (("--largest-batch", "--memory", "8 elephants"), "unknown unit 'elephants'"),
        (("--largest-batch", "--memory", "0B"), "memory: Input should be greater than 0"),
    ],
)
def test_bad_input_is_one_line_that_names_it(line, arguments, problem) -> None:
    if "1000" in map(str, arguments):
        arguments = (*arguments, "--batch-size", 1000)
    line("profile", "lenet5", *arguments)
    assert (line.code, line.out) == (2, "")
    assert line.err.startswith("paceline: ")
    assert problem in line.err
    assert line.err.count("\n") == 1
