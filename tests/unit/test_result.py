"""Result files, and the terminal output of results and of a running command."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from findings import run
from paceline.core.outcome import ChunkTrial
from paceline.records.result import read_result
from paceline.report.run import result_tables
from paceline.runs.progress import TerminalProgress
from refusals import refused

RESULT = run({"forward": 0.011}, step_s=0.010, samples_per_s=6400)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "result.json").write_text(RESULT.model_dump_json(indent=2))
    return tmp_path


def test_a_result_is_read_as_it_was_written(folder):
    assert read_result(folder) == RESULT
    assert RESULT.prediction_error == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"kind": "walk"}, "kind"),
        ({"surprise": 1}, "surprise"),
        ({"settings": {"kind": "train", "model": "a", "workers": 0}}, "settings.train: workers"),
        ({"epochs": [{}]}, "epochs.0.number"),
    ],
)
def test_a_damaged_result_is_refused_with_file_and_place(folder, change, place):
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(path) as caught:
        read_result(folder)
    assert caught.value.problem.startswith(f"{place}: ")


def test_the_summary_has_the_prediction_and_the_measurement():
    *_, text = result_tables(RESULT, "runs/x")
    figures = ("50.00 %", "11.0 ms", "9.57 ms", "12.4 ms", "10.0 ms", "+10.0 %", "6,400")
    assert all(figure in text for figure in (*figures, "2 workers", "runs/x/result.json"))
    many_times_off = RESULT.model_copy(update={"predicted_step_s": 2.52, "plans": ()})
    assert "252 times" in [*result_tables(many_times_off, "runs/x")][-1]


def test_the_chosen_size_of_a_search_for_the_chunk_is_marked():
    trials = (ChunkTrial(6, 0.25, 0.2), ChunkTrial(4, 0.3, 0.004))
    result = RESULT.model_copy(update={"trials": trials, "config": {"chunk": 6}})
    table, *_ = result_tables(result, "runs/x")
    rows = [["6", "4"], ["250 ms", "300 ms"], ["200 ms", "4.00 ms"], ["chosen", ""]]
    assert [list(column.cells) for column in table.columns] == rows


def test_the_bar_of_measuring_disappears_before_anything_is_printed():
    console = Console(file=StringIO(), force_terminal=True, width=100)
    progress = TerminalProgress(console, "training")
    with progress.measuring(4):
        assert console._live_stack  # a bar is drawn
    assert not console._live_stack
    progress.begin(20, "steps")
    progress.advance()
    progress.close()
    shown = console.file.getvalue()
    assert shown.index("measuring") < shown.index("about 4 s") < shown.index("training")
    assert "1/20" in shown
    nowhere = Console(file=StringIO())  # no terminal: no bar
    with TerminalProgress(nowhere, "training").measuring(4):
        assert not nowhere.file.getvalue()
