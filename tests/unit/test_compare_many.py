"""Any number of runs beside each other, in the terminal, as JSON and as a page."""

import json
import re
from pathlib import Path

import pytest

from command_line import write_run
from paceline.core.outcome import Epoch, Updates
from paceline.records.result import read_run
from paceline.report.page import write_page
from paceline.report.side_by_side import SideBySide, epoch_rows, side_by_side, time_rows
from paceline.report.side_by_side_page import drawn
from refusals import refused, refused_field

# Seconds of an epoch, and the test losses after epochs.
CURVES = {"fast": (1.0, (0.8, 0.6, 0.5)), "slow": (2.0, (0.7, 0.4)), "wild": (0.5, (0.9, 0.55))}
SHARES = {"slow": {"cpu0": 30, "gpu0": 10}}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for name, (seconds, losses) in CURVES.items():
        settings = read_run(write_run(tmp_path / name, 1, 2)).settings
        changes = {"settings": settings.model_copy(update={"options": {"policy": name}})}
        changes["epochs"] = tuple(
            Epoch(number, 2 * loss, loss, 0.5, seconds) for number, loss in enumerate(losses)
        )
        if made := SHARES.get(name):
            changes["updates"] = Updates(sum(made.values()), made, {}, 0.0)
            changes["utilisation"] = {"cpu0": 0.9, "gpu0": 0.45}
        write(tmp_path / name, **changes)
    return [tmp_path / name for name in CURVES]


def write(folder: Path, **changes: object) -> None:
    result = read_run(folder).model_copy(update=changes)
    (folder / "result.json").write_text(result.model_dump_json())


def test_losses_are_divided_by_the_lowest_of_all(folders):
    sides = side_by_side(folders)
    assert (sides.loss, sides.lowest, sides.reached) == ("test loss", 0.4, 0.55)
    # Until 0.55: after the third epoch, the second, the second.
    assert [run.reached_s for run in sides.runs] == [3.0, 4.0, 1.0]
    assert [run.differs for run in sides.runs] == [f"policy {name}" for name in CURVES]
    # Up to 1 s, at which the last run was over; the slow one had no epoch by then.
    assert sides.times == pytest.approx([number / 6 for number in range(1, 7)])
    rows = time_rows(sides)
    assert [row[1:] for row in rows[:2]] == [("-", "-", "-")] * 2
    assert rows[2][1:] == ("-", "-", "2.250")
    assert rows[5][1:] == ("2.000", "-", "1.375")
    assert epoch_rows(sides) == [
        ("1", "2.000", "1.750", "2.250"),
        ("2", "1.500", "1.000", "1.375"),
        ("3", "1.250", "-", "-"),
    ]


def test_updates_and_utilisation_are_of_the_runs_that_have_them(folders):
    fast, slow, _ = side_by_side(folders).runs
    assert (fast.update_shares, fast.utilisation, fast.num_updates) == ({}, {}, None)
    assert slow.update_shares == {"cpu0": 0.75, "gpu0": 0.25}
    assert (slow.utilisation, slow.num_updates) == ({"cpu0": 0.9, "gpu0": 0.45}, 40)


def test_without_a_test_the_training_loss_is_shown(folders):
    epochs = read_run(folders[0]).epochs
    write(folders[0], epochs=tuple(Epoch(n, 3.0, None, None, 1.0) for n, _ in enumerate(epochs)))
    sides = side_by_side(folders)
    assert sides.loss == "train loss"
    assert [run.lowest for run in sides.runs] == [3.0, 0.8, 1.1]


def test_runs_of_one_name_are_told_apart_by_their_paths(folders, tmp_path):
    (tmp_path / "other").mkdir()
    twin = write_run(tmp_path / "other" / "fast", 1, 2)
    write(twin, epochs=read_run(folders[0]).epochs)
    names = [run.name for run in side_by_side([folders[0], twin]).runs]
    assert names == [str(folders[0]), str(twin)]


def test_a_rehearsal_without_epochs_has_no_place_among_them(folders):
    write(folders[1], epochs=())
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


def test_two_runs_have_their_steps_and_a_page_of_losses(line, folders, tmp_path):
    page = tmp_path / "two.html"
    line("compare", *folders[:2], "--page", page, "--json")
    assert (line.code, line.err) == (0, "")
    assert json.loads(line.out)["left"] == "fast"
    assert page.is_file()
    line("compare", *folders[:2], "--page", page)
    assert "forward" in line.out  # of the steps
    assert "policy slow" in line.out  # of the runs beside each other
    assert str(page) in line.out
    line("compare", folders[0], "--page", tmp_path / "one.html")
    assert (line.code, refused_field(line.err)) == (2, "page")  # that is its report
    assert not (tmp_path / "one.html").exists()


def test_names_from_files_are_text(folders, tmp_path):
    named = folders[0].rename(tmp_path / "<b>bold")
    write_page(tmp_path / "page.html", *drawn(side_by_side([named, *folders[1:]])))
    page = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;bold" in page
    assert "<b>bold" not in page.split('id="plotly"')[0]
