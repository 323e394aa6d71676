"""`paceline compare` and `paceline report`: what they print of folders of runs."""

from pathlib import Path

import pytest

from command_line import write_run
from paceline.records.result import read_run


def change(folder: Path, **changes: object) -> Path:
    """Change a run's result: its fields, or those of its settings and machine."""
    result = read_run(folder)
    for name in ("settings", "machine"):
        part = changes.pop(name, {})
        old = getattr(result, name)
        new = old | part if isinstance(old, dict) else old.model_copy(update=part)
        result = result.model_copy(update={name: new})
    result = result.model_copy(update=changes)
    (folder / "result.json").write_text(result.model_dump_json())
    return folder


def test_a_run_is_compared_with_its_prediction(line, tmp_path):
    folder = write_run(tmp_path / "run", 1.5, 2.0)
    table = line("compare", folder, "--json").found
    assert (table["left"], table["right"]) == ("predicted", "measured")
    first = table["rows"][0]
    assert first["quantity"] == "step"
    assert (first["left_s"], first["right_s"]) == pytest.approx((1.5, 2.0))
    assert first["error"] == pytest.approx(-0.25)
    assert "-25.0 %" in line("compare", folder).out


def test_two_runs_are_compared_by_what_differs_and_what_came_of_it(line, tmp_path):
    one, other = write_run(tmp_path / "one", 1, 4), write_run(tmp_path / "other", 7, 3)
    change(one, machine={"torch": "2.12"}, samples_per_s=16.0, accuracy=0.5)
    new = {"learning_rate": 0.5, "options": {"bucket_mb": 3}, "output": "elsewhere"}
    change(other, settings=new, machine={"torch": "2.13"}, samples_per_s=21.0, accuracy=0.75)
    found = line("compare", one, other, "--json").found
    assert (found["left"], found["right"]) == ("one", "other")
    step = found["rows"][0]
    assert (step["left_s"], step["right_s"]) == pytest.approx((4, 3))
    assert found["settings"] == [
        {"name": "learning_rate", "left": None, "right": 0.5},
        {"name": "bucket_mb (of the strategy)", "left": None, "right": 3},
    ]
    assert found["machine"] == [{"name": "torch", "left": "2.12", "right": "2.13"}]
    figures = {row["name"]: (row["left"], row["right"]) for row in found["figures"]}
    assert figures["test accuracy"] == (0.5, 0.75)
    assert figures["step, untraced"] == (4, 3)
    assert figures["samples/s"] == (16, 21)
    faster, shorter, machine = found["sentences"]
    assert all(figure in faster for figure in ("21.0", "16.0", "1.31"))
    assert "1.00 s" in shorter  # half of a step is forward, and half the update: 0.5 s less of each
    assert "torch" in machine
    line("compare", one, other)
    assert line.code == 0
    assert all(shown in line.out for shown in ("one", "other", "1.31", "+25.00", "-25.0 %"))


def test_a_comparison_of_unlike_batches_or_of_equal_runs(line, tmp_path):
    one, other = write_run(tmp_path / "one", 1, 4), write_run(tmp_path / "other", 7, 3)
    change(other, settings={"batch_size": 128})
    (setting,) = line("compare", one, other, "--json").found["settings"]
    assert setting["name"] == "batch_size"
    same = line("compare", one, one, "--json").found
    assert (same["settings"], same["machine"]) == ([], [])
    assert line("compare", one, one).code == 0


def test_a_report_is_written_anew_and_its_path_printed(line, tmp_path):
    folder = write_run(tmp_path / "run", 1, 1)
    line("report", folder)
    assert (line.code, line.err, line.out) == (0, "", f"{folder}/report.html\n")
    assert "lenet5" in (folder / "report.html").read_text()
    assert line("report", folder, "--json").found == {"report": f"{folder}/report.html"}
