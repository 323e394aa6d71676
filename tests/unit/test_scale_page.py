"""The page of a scaling study: its sections, figures and tables, against closed forms."""

import re
from pathlib import Path

import pytest

from findings import numbers
from paceline.core.timeline import Origin
from paceline.records.result import read_result
from paceline.records.scale import ScaleCell, ScaleResult, ScaleSettings
from paceline.report import write_report
from paceline.report.scale import drawn
from paceline.studies.scale.conclusions import insights
from scale_cells import cell, failed, study

OVERHEAD, BESIDE = "A method&#x27;s overhead on one worker", "Predicted beside found"


def result_of(cells: list[ScaleCell]) -> ScaleResult:
    return ScaleResult(
        id="20261122-030000-net-scale",
        paceline="0.1.0",
        settings=ScaleSettings(model="<net>", workers=(1, 2, 4), batch_size=(16,)),
        machine={"processor": "some"},
        cells=tuple(cells),
        insights=insights("<net>", cells),
    )


def page(folder: Path, cells: list[ScaleCell]) -> str:
    result = result_of(cells)
    (folder / "result.json").write_text(result.model_dump_json())
    assert read_result(folder) == result
    return write_report(folder).read_text()


def section(cells: list[ScaleCell], title: str) -> str:
    """Return a section of the page of a study with these cells."""
    _, sections = drawn(result_of(cells))
    (found,) = [one for one in sections if f"<h2>{title}</h2>" in one]
    return found


def rows(html: str) -> list[list[str]]:
    """Return the texts of a table's cells, row by row, the head first."""
    found = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd] [^>]*>([^<]*)</t[hd]>", row) for row in found]


def last(html: str) -> list[str]:
    """Return the last cell of each row below the head."""
    return [row[-1] for row in rows(html)[1:]]


def percent(*shares: float) -> list[str]:
    return [f"{100 * one:.1f} %" for one in shares]


def test_the_page_draws_the_figures_and_names_what_failed(tmp_path):
    costs = {"allreduce": 10.0, "tree": 30.0}
    scalings = ("strong", "weak", "strong-per-worker")
    cells = [one for scaling in scalings for one in study(costs, (1, 2), scaling=scaling)]
    cells += [one.model_copy(update={"kind": Origin.PREDICTED}) for one in cells]
    text = page(tmp_path, [*cells, failed("host", 2)])
    for name in (*scalings, "breakdowns"):
        assert f'id="figure-{name}"' in text
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert {"Synchronisation", OVERHEAD, BESIDE} <= set(titles)
    assert "worker 1 was ended by SIGKILL" in text
    assert "<net>" not in text
    assert "&lt;net&gt;" in text


def test_the_page_of_a_study_in_which_all_failed_is_a_page(tmp_path):
    text = page(tmp_path, [failed(), failed("tree")])
    assert "0 of 2" in text
    assert "plotly.js v" not in text


def guess(method: str, epoch_s: float) -> ScaleCell:
    spread = (0.87 * epoch_s, 1.13 * epoch_s)
    return cell(method, kind="predicted", epoch_s=epoch_s, spread=spread)


def test_overheads_that_cannot_be_told_apart_are_marked():
    spreads = {"tree": (9.8, 10.2), "host": (9.9, 10.4), "allreduce": (12.0, 12.3)}
    epochs_s = {"tree": 10.0, "host": 10.1, "allreduce": 12.18}
    cells = [cell(name, epoch_s=s, spread=spreads[name]) for name, s in epochs_s.items()]
    found = section(cells, OVERHEAD)
    (row,) = rows(found)[1:]
    assert row[:3] == ["measured", "16", "10.0 s"]
    assert [numbers(one) for one in row[3:]] == [[0.0], [1.0], [21.8]]
    assert ["," in one for one in row[3:]] == [False, True, False]  # the second is marked
    assert 'data-value="1">+1.0 %,' in found  # what is copied is the number
    # Of predictions by their ranges.
    found = section([guess("tree", 10.0), guess("host", 12.9), guess("allreduce", 13.1)], OVERHEAD)
    assert [numbers(one) for one in rows(found)[1][3:]] == [[0.0], [29.0], [31.0]]
    assert ["," in one for one in rows(found)[1][3:]] == [False, True, False]
    # Beyond tenfold in times.
    assert last(section([cell("tree"), cell("host", epoch_s=2529.83)], OVERHEAD)) == ["253 times"]


@pytest.mark.parametrize(
    ("restless", "is_doubted"),
    [
        (cell("tree", spread=(8.0, 13.0)), True),
        (cell("tree", 2, spread=(5.0, 15.0)), False),  # that did not run on one worker
    ],
)
def test_overheads_on_a_busy_machine_are_doubted(restless, is_doubted):
    quiet = cell("host", epoch_s=20.0, spread=(19.0, 21.0))
    found = section([*([] if is_doubted else [cell("tree")]), restless, quiet], OVERHEAD)
    assert ("±25 %" in found) is is_doubted
    assert last(found) == ["+100.0 %"]  # as much can be told all the same


@pytest.mark.parametrize(
    ("epochs_s", "mean", "errors"),
    [
        # By 20 %, -10 % and 0 %: 10 % on average, and 3.3 % if signs counted.
        (
            {"tree": (12.0, 10.0), "host": (18.0, 20.0), "allreduce": (5.0, 5.0)},
            *(10.0, ["+20.0 %", "-10.0 %", "+0.0 %"]),
        ),
        # As a share of what was found, and not of the prediction.
        ({"tree": (20.0, 10.0)}, 100.0, ["+100.0 %"]),
        ({"tree": (2529.83, 10.0)}, None, ["253 times"]),
    ],
)
def test_predictions_beside_what_was_found(epochs_s, mean, errors):
    cells = [cell("tree", 2, kind="predicted", epoch_s=1e6)]  # nothing was found beside it
    for method, (predicted_s, found_s) in epochs_s.items():
        cells.append(cell(method, kind="predicted", epoch_s=predicted_s))
        cells.append(cell(method, epoch_s=found_s))
    found = section(cells, BESIDE)
    assert last(found) == errors
    assert [row[0] for row in rows(found)[1:]] == list(epochs_s)
    if mean is not None:
        (note,) = re.findall(r"<p[^>]*>(.*?)</p>", found)
        assert mean in numbers(note)


def test_workers_wait_for_the_exchange_s_share_of_an_epoch():
    """Workers compute 100 s among them, or 100 s each, and an exchange of e s shows."""
    costs = {"allreduce": 10.0, "tree": 30.0}
    cells = study(costs, (1, 2, 4)) + study(costs, (1, 2, 4), scaling="weak")
    head, *body = rows(section(cells, "Synchronisation"))
    assert head[-3:] == ["1 w.", "2 w.", "4 w."]
    assert {(row[0], row[2]): row[-3:] for row in body} == {
        (method, scaling): percent(0, shown_s / (one + shown_s), shown_s / (other + shown_s))
        for method, shown_s in costs.items()
        for scaling, one, other in (("strong", 100 / 2, 100 / 4), ("weak", 100, 100))
    }


def test_idle_time_is_waiting_and_a_hidden_exchange_is_not():
    waits = {"epoch_s": 8.0, "exposed_s": 0.5, "idle_s": 1.5, "hidden_s": 4.0}
    cells = [cell("host", 2, **waits), cell("host", 4, **waits | {"idle_s": 0.3})]
    assert rows(section(cells, "Synchronisation"))[1][-2:] == percent(2.0 / 8, 0.8 / 8)
    # What was not measured is a dash, and kinds have rows of their own.
    waits = {"exposed_s": 1.0, "idle_s": 0.0}
    cells = [cell("tree", 2, **waits), cell("tree", 4, kind="rehearsed", **waits)]
    assert {row[3]: row[-2:] for row in rows(section(cells, "Synchronisation"))[1:]} == {
        "measured": ["10.0 %", "-"],
        "rehearsed": ["-", "10.0 %"],
    }
