"""The first screen of a run's page: the prediction beside the run, and topics that stand once."""

import re
from pathlib import Path

import pytest

from command_line import write_run
from paceline.core.outcome import Epoch
from paceline.records.result import read_run
from paceline.report import write_report


def page(folder: Path, **changes: object) -> str:
    """The page of a run of which these fields are changed."""
    result = read_run(folder).model_copy(update=changes)
    (folder / "result.json").write_text(result.model_dump_json())
    return write_report(folder).read_text()


def tiles(text: str) -> dict[str, tuple[str, str]]:
    """The value and the note of each tile, by its label."""
    found = re.findall(r'<div class="tile"><span>(.*?)</span><b>(.*?)</b><small>(.*?)</sm', text)
    return {label: (value, note) for label, value, note in found}


@pytest.mark.parametrize("origin", ["measured", "rehearsed"])
@pytest.mark.parametrize(
    ("step_s", "lies"), [(0.86, "outside"), (0.88, "within"), (1.12, "within"), (1.14, "outside")]
)
def test_the_median_lies_within_the_range_or_outside(tmp_path, step_s, lies, origin) -> None:
    found = tiles(page(write_run(tmp_path / "run", 1.0, step_s), origin=origin))
    note = "range meant to hold 9 of 10 medians: 870 ms to 1.13 s"  # 13 % around 1 s
    assert found["predicted step"] == ("1.00 s", note)
    assert found[f"{origin} step"][1] == "median of the untraced steps"
    assert found["prediction error"][1] == f"the {origin} step is {lies} the range"


@pytest.mark.parametrize(
    ("origin", "before"), [("measured", "training"), ("rehearsed", "the rehearsal")]
)
def test_without_a_range_nothing_lies_within_it(tmp_path, origin, before) -> None:
    """As after a search on the way, whose prediction no plan has."""
    found = tiles(page(write_run(tmp_path / "run", 1.0, 2.0), origin=origin, predicted_step_s=1.5))
    assert found["predicted step"] == ("1.50 s", f"before {before}")
    assert found["prediction error"] == ("-25.0 %", f"predicted against {origin}")


def test_a_topic_stands_once_with_all_that_is_said_about_it(tmp_path) -> None:
    usual = {"train_loss": 2, "score": 0.5, "seconds": 3}
    epochs = tuple(Epoch(i, test_loss=loss, **usual) for i, loss in enumerate((2.0, 1.0)))
    text = page(write_run(tmp_path / "run", 1.0, 1.0), epochs=epochs)
    topics = re.findall(r'class="topic">(.*?)</span>', text)
    assert "what next" in topics
    assert len(topics) == len(set(topics))
    (both,) = re.findall(r'<li><span class="topic">what next</span>(.*?)</li>', text)
    assert both.index("Take larger batches") < both.index("train for more epochs")
