"""`paceline plan` with what somebody has measured, and in half precision."""

import json
from typing import Any

import pytest

import paceline
from paceline.records.profile import ProfileSettings
from profiles import profile_result, write_profile

MACHINE = ("--machine", "8xv100.toml")  # there is no such file where the tests run
ALONE = ("--strategy", "allreduce")


def planned(line, model: str, *arguments: object) -> dict[int, dict[str, Any]]:
    """Return the only plan of each number of workers."""
    line("plan", model, *MACHINE, *ALONE, *arguments, "--json")
    assert (line.code, line.err) == (0, "")
    rows = json.loads(line.out)["plans"]
    found = {row["workers"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_one_makes_what_was_measured_and_eight_make_less_than_eight_times_as_much(line):
    found = planned(line, "resnet50", "--batch-size", 128, "--measured", "350/s")
    assert set(found) == set(range(1, 9))
    assert found[1]["samples_per_s"] == pytest.approx(350.0)
    assert 4 * 350 < found[8]["samples_per_s"] < 8 * 350


def test_a_measured_rate_may_say_its_batch(line):
    asked = ("--batch-size", 128, "--workers", 8)
    (own,), (stated,), (large,) = (
        planned(line, "resnet50", *asked, "--measured", rate).values()
        for rate in ("350/s", "350/s@16", "350/s@1024")
    )
    assert own["step_s"] == pytest.approx(stated["step_s"])
    assert large["step_s"] > stated["step_s"]  # calls weigh less in a large batch


def test_a_profile_s_folder_says_how_fast_a_device_is(line, tmp_path):
    settings = ProfileSettings(model="lenet5", workers=1, batch_size=64)
    result = profile_result(settings=settings, workers=profile_result().workers[:1])
    assert result.step.median_s == pytest.approx(0.01)
    write_profile(tmp_path / "profiled", result)
    asked = ("--batch-size", 64, "--workers", 1, "--profile", "profiled")
    assert planned(line, "lenet5", *asked)[1]["step_s"] == pytest.approx(0.01)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_planned_on_its_own_units(line, precision):
    asked = {"batch_size": 512, "workers": 8}
    options = ("--batch-size", 512, "--workers", 8)
    (whole,) = planned(line, "resnet50", *options).values()
    (half,) = planned(line, "resnet50", *options, "--precision", precision).values()
    # Tensor cores are eight times as fast; memory is read half as much.
    assert 2 < whole["step_s"] / half["step_s"] < 125 / 15.7
    assert half["wire_nbytes_per_step"] == whole["wire_nbytes_per_step"]
    same = paceline.forecast("resnet50", "8xv100", precision=precision, **asked)
    assert half["step_s"] == pytest.approx(same.step_s)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (("--measured", "350"), "measured: '350' is no speed; write samples a second"),
        (("--measured", "350/s", "--profile", "two"), "measured, profile: each says how fast"),
        (("--profile", "two"), "profile: two is not of `paceline profile` with one worker"),
        (("--profile", "none"), "none: there is no such folder"),
        (("--precision", "int8"), "precision: "),
    ],
)
def test_what_says_no_speed_is_one_line_that_names_it(line, tmp_path, asked, problem):
    write_profile(tmp_path / "two", profile_result())  # of two workers
    line("plan", "lenet5", *MACHINE, *ALONE, *asked)
    assert (line.code, line.out) == (2, "")
    assert line.err.startswith("paceline: ")
    assert problem in line.err
    assert line.err.count("\n") == 1
