"""The frame of the papers' tables: errors, counts, and the limit on calibrated constants."""

from io import StringIO

import pytest
from rich.console import Console

from paceline.core.errors import InvalidInput
from paceline.studies.papers import NAMES, paper
from paceline.studies.papers.paper_tables import (
    Basis,
    Paper,
    PaperCell,
    PaperTable,
    as_object,
    mean_error,
    read_printed,
    show,
)
from paper_markdown import markdown

CELLS = (
    PaperCell("one", 100.0, 110.0, Basis.PREDICTED),
    PaperCell("two", 50.0, 48.0, Basis.PREDICTED),
    PaperCell("three", 7.0, 9.0, Basis.CALIBRATED),
    PaperCell("four", 1024.0, 1024.0, Basis.EXACT),
    PaperCell("winner", "ring", "tree", Basis.PREDICTED),
)
PAPER = Paper("some", "Some, 2020", (PaperTable("Table 1: ms", CELLS),), (("rate", "three"),))


def test_only_predicted_numbers_count_for_the_error():
    assert mean_error(PAPER.cells) == pytest.approx((0.1 + 0.04) / 2)
    assert mean_error(CELLS[2:]) is None
    assert mean_error([PaperCell("zero", 0.0, 1.0, Basis.PREDICTED)]) is None


def test_more_constants_than_a_third_of_the_predictions_are_too_many():
    two = (("a", "x"), ("b", "y"))
    with pytest.raises(ValueError, match="2 calibrated constants are too many for 3 predicted"):
        Paper("some", "", PAPER.tables, two)


def test_a_number_is_not_compared_with_a_word():
    with pytest.raises(ValueError, match="cannot be compared"):
        PaperCell("one", 1.0, "one", Basis.EXACT)


def test_the_object_has_all_cells():
    found = as_object(PAPER)
    assert found["name"] == "some"
    [table] = found["tables"]
    assert table["title"] == "Table 1: ms"
    assert table["cells"][0] == {
        "cell": "one", "printed": 100.0, "ours": 110.0, "kind": "predicted"
    }  # fmt: skip
    assert [cell["kind"] for cell in table["cells"]] == [
        "predicted", "predicted", "calibrated", "exact", "predicted"
    ]  # fmt: skip


def test_tables_say_errors_and_what_agrees():
    out = Console(file=StringIO(), width=100)
    show(out, [PAPER, PAPER])
    text = out.file.getvalue()
    assert "+10.0%" in text
    assert "-4.0%" in text
    assert "differs" in text
    summary = (
        "mean absolute error of 2 predicted cells 7.0%; 0 of 1 predicted choices agree; "
        "1 of 1 exact cells agree"
    )
    assert f"some: 1 calibrated constants; {summary}" in text
    assert "all papers: mean absolute error of 4 predicted cells 7.0%" in text


def test_the_readme_has_the_same_cells():
    lines = markdown(PAPER).splitlines()
    assert lines[:3] == ["**Table 1: ms**", "", "|  | printed | ours | error | kind |"]
    assert "| four | 1,024 | 1,024 | 0 % | exact |" in lines


@pytest.mark.parametrize("name", NAMES)
def test_what_a_paper_prints_is_installed_with_the_package(name):
    """By importlib.resources, as from a wheel: no path of the repository is needed."""
    data = read_printed(name)
    assert data["citation"]
    tables = [table["name"] for table in data["tables"]]
    assert len(tables) == len(set(tables)) > 0


def test_an_unknown_paper_is_told_which_are():
    with pytest.raises(InvalidInput, match="choose one of cgdp, wheel, dgx1"):
        paper("resnet")
