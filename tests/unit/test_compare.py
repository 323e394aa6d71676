"""`paceline compare` and `paceline report` with one run, two runs and more."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from command_line import write_run
from paceline.core.outcome import Epoch, Updates
from paceline.records.result import read_run
from paceline.report.comparison import SideBySide, epochs_table, side_by_side, times_table
from refusals import refused

# Seconds per epoch, and the test loss after each epoch.
CURVES = {"fast": (1.0, (0.8, 0.6, 0.5)), "slow": (2.0, (0.7, 0.4)), "wild": (0.5, (0.9, 0.55))}
SHARES = {"slow": {"cpu0": 30, "gpu0": 10}}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for name, (seconds, losses) in CURVES.items():
        write_run(tmp_path / name, 1, 2)
        changes: dict[str, Any] = {"settings": {"options": {"policy": name}}}
        changes["epochs"] = tuple(
            Epoch(number, 2 * loss, loss, 0.5, seconds) for number, loss in enumerate(losses)
        )
        if made := SHARES.get(name):
            changes["updates"] = Updates(sum(made.values()), made, {}, 0.0)
            changes["utilisation"] = {"cpu0": 0.9, "gpu0": 0.45}
        change(tmp_path / name, **changes)
    return [tmp_path / name for name in CURVES]


def test_losses_are_divided_by_the_lowest_of_all(folders):
    sides = side_by_side(folders)
    assert (sides.loss, sides.lowest, sides.reached) == ("test loss", 0.4, 0.55)
    # A loss of 0.55 is reached after epochs 3, 2 and 2.
    assert [run.reached_s for run in sides.runs] == [3.0, 4.0, 1.0]
    assert [run.differs for run in sides.runs] == [f"policy {name}" for name in CURVES]
    # Until 1 s, when the shortest run ended; the slow run had not completed an epoch by then.
    rows = times_table(sides).rows
    assert [row[0].value for row in rows] == pytest.approx([number / 6 for number in range(1, 7)])
    assert [row[1:] for row in rows[:2]] == [("-", "-", "-")] * 2
    assert (rows[2][1:], rows[5][1:]) == (("-", "-", "2.250"), ("2.000", "-", "1.375"))
    assert epochs_table(sides).rows == [
        ("1", "2.000", "1.750", "2.250"),
        ("2", "1.500", "1.000", "1.375"),
        ("3", "1.250", "-", "-"),
    ]
    # Updates and utilisation are read if a run has them.
    fast, slow, _ = sides.runs
    assert (fast.update_shares, fast.utilisation, fast.num_updates) == ({}, {}, None)
    assert slow.update_shares == {"cpu0": 0.75, "gpu0": 0.25}
    assert (slow.utilisation, slow.num_updates) == ({"cpu0": 0.9, "gpu0": 0.45}, 40)


def test_without_a_test_the_training_loss_is_shown(folders):
    epochs = read_run(folders[0]).epochs
    change(folders[0], epochs=tuple(Epoch(n, 3.0, None, None, 1.0) for n, _ in enumerate(epochs)))
    sides = side_by_side(folders)
    assert sides.loss == "train loss"
    assert [run.lowest for run in sides.runs] == [3.0, 0.8, 1.1]


def test_runs_of_one_name_are_told_apart_by_their_paths(folders, tmp_path):
    (tmp_path / "other").mkdir()
    twin = write_run(tmp_path / "other" / "fast", 1, 2)
    change(twin, epochs=read_run(folders[0]).epochs)
    names = [run.name for run in side_by_side([folders[0], twin]).runs]
    assert names == [str(folders[0]), str(twin)]


def test_a_rehearsal_without_epochs_is_refused(folders):
    change(folders[1], epochs=())
    with refused(folders[1]):
        side_by_side(folders)


def test_three_runs_in_the_terminal_as_json_and_on_a_page(line, folders, tmp_path):
    page = tmp_path / "three.html"
    line("compare", *folders, "--page", page)
    assert (line.code, line.err) == (0, "")
    for text in ("policy wild", "75.0"):
        assert text in line.out
    text = page.read_text()
    figures = re.findall(r'<div id="figure-([a-z]+)"', text)
    assert figures == ["losses", "updates", "utilisation"]
    described = json.loads(
        re.search(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)[1]
    )
    lines = {(one["name"], one["xaxis"]): one["y"] for one in described["data"]}
    assert len(lines) == 6
    assert lines["slow", "x"] == lines["slow", "x2"] == pytest.approx([1.75, 1.0])
    line("compare", *folders, "--json")
    assert (line.code, line.err) == (0, "")
    assert SideBySide.model_validate_json(line.out) == side_by_side(folders)


def change(folder: Path, settings: Mapping[str, Any] | None = None, **changes: object) -> None:
    """Change fields of a run's result and of its settings."""
    result = read_run(folder)
    changes["settings"] = result.settings.model_copy(update=settings)
    (folder / "result.json").write_text(result.model_copy(update=changes).model_dump_json())


def test_a_run_is_compared_with_its_prediction(line, tmp_path):
    folder = write_run(tmp_path / "run", 1.5, 2.0)
    table = line("compare", folder, "--json").found
    assert (table["left"], table["right"]) == ("predicted", "measured")
    first = {"quantity": "step", "left_s": 1.5, "right_s": 2.0, "error": -0.25}
    assert table["rows"][0] == pytest.approx(first)
    out = line("compare", folder).out
    assert all(figure in out for figure in ("1.50 s", "2.00 s", "-25.0 %"))
    # A single run has a report instead of a page.
    assert line("compare", folder, "--page", tmp_path / "one.html").refused == "page"
    assert not (tmp_path / "one.html").exists()


def test_two_runs_are_compared_by_settings_machines_and_results(line, tmp_path):
    one, other = write_run(tmp_path / "one", 1, 4), write_run(tmp_path / "other", 7, 3)
    change(one, machine={"torch": "2.12"}, samples_per_s=16.0, accuracy=0.5)
    new = {"learning_rate": 0.5, "options": {"bucket_mb": 3}, "output": "elsewhere"}
    change(other, settings=new, machine={"torch": "2.13"}, samples_per_s=21.0, accuracy=0.75)
    page = tmp_path / "two.html"
    found = line("compare", one, other, "--page", page, "--json").found
    assert page.is_file()
    assert (found["left"], found["right"]) == ("one", "other")
    step = found["rows"][0]
    assert (step["left_s"], step["right_s"]) == pytest.approx((4, 3))
    assert found["settings"] == [
        {"name": "learning_rate", "left": None, "right": 0.5},
        {"name": "bucket_mb (of the strategy)", "left": None, "right": 3},
    ]
    assert found["machine"] == [{"name": "torch", "left": "2.12", "right": "2.13"}]
    figures = {row["name"]: (row["left"], row["right"]) for row in found["figures"]}
    expected = {"test accuracy": (0.5, 0.75), "step, untraced": (4, 3), "samples/s": (16, 21)}
    assert figures.items() >= expected.items()
    values = {one["code"]: one["value"] for one in found["findings"]}
    assert values == pytest.approx({"other_rate": 21 / 16, "other_step": 0.25})
    out = line("compare", one, other, "--page", page).out
    # The steps, the results, and both runs side by side.
    shown = ("forward", "1.31", "+25.00", "-25.0 %", "learning rate 0.5", str(page))
    assert all(text in out for text in shown)
    change(other, settings={"batch_size": 128})
    assert "batch size" in line("compare", one, other).out
    same = line("compare", one, one, "--json").found
    assert (same["settings"], same["machine"]) == ([], [])
    assert line("compare", one, one).code == 0


def test_a_report_is_written_anew_and_its_path_printed(line, tmp_path):
    folder = write_run(tmp_path / "run", 1, 1)
    assert line("report", folder).out == f"{folder}/report.html\n"
    (folder / "report.html").write_text("")
    line("report", folder)
    assert "lenet5" in (folder / "report.html").read_text()
