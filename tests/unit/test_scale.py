"""Predicted scaling studies from the command line, and the page of a study."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from command_line import MACHINE
from findings import numbers
from paceline.core.timeline import Origin
from paceline.planner import forecast
from paceline.records.machine_file import read_machine
from paceline.records.result import read_result
from paceline.records.scale import ScaleCell, ScaleResult, ScaleSettings
from paceline.report import write_report
from paceline.report.advice import findings
from paceline.report.metrics import of_study
from paceline.report.scale import page_of
from paceline.report.tables import Table
from paceline.strategies import find_exchange
from paceline.studies.scale.study import study_of
from paceline.studies.scale.study_runs import runs
from scale_cells import cell, failed, model_source, study

BROKEN = model_source("Broken", "return self.layer(x) @ torch.ones(3, 3)")
PARTICULAR = model_source(
    "Particular", "if len(x) == 32: raise RuntimeError('not so many')", "return self.layer(x)"
)


def predicted(line, *arguments: object, machine=MACHINE) -> dict:
    line("scale", *arguments, "--kind", "predicted", "--machine", machine, "--json")
    assert line.code == 0, line.err
    return json.loads(line.out)


def test_a_cell_is_the_forecast_of_its_plan(line):
    asked = {"workers": (2,), "batch_size": (16,), "strategy": ("allreduce",)}
    settings = ScaleSettings(model="lenet5", kinds=("predicted",), machine=str(MACHINE), **asked)
    study, machine = study_of(settings), read_machine(MACHINE)
    strategy = find_exchange("allreduce")
    plan = forecast(study.workload(8), machine, strategy, strategy.config(workers=2), 16)
    (step,) = map(study.predicted, runs(settings))
    assert step.memory_bytes == max(plan.memory_nbytes.values())
    assert sum(step.shares.values()) - step.shares["hidden"] == pytest.approx(1)
    asked = ("--workers", 2, "--strategy", "allreduce", "--samples", 160)
    (found,) = predicted(line, "lenet5", "--batch-size", "16", *asked)["cells"]
    assert plan.range_share >= 0.07
    assert found["epoch_s"] == pytest.approx(10 * plan.step_s)
    assert found["spread"] == pytest.approx([10 * one for one in plan.range_s])


def test_cells_that_cannot_be_are_rows_that_say_so(line, tmp_path):
    """More workers than the machine has, and a batch for which the model raises."""
    asked = ("--batch-size", "16", "--scaling", "strong,weak", "--samples", 1000)
    cells = predicted(line, "lenet5", *asked, "--workers", "1,2,4")["cells"]
    assert len(cells) == 3 * 3 * 2
    for one in cells:
        assert one["kind"] == "predicted"
        assert (one["epoch_s"] is None) == (one["error"] is not None) == (one["workers"] == 4)
        assert one["error"] or one["spread"][0] < one["epoch_s"] < one["spread"][1]
    alone = {one["scaling"]: one["epoch_s"] for one in cells if one["workers"] == 1}
    assert alone["strong"] == alone["weak"]
    (tmp_path / "particular_model.py").write_text(PARTICULAR)
    own = ("particular_model:Particular", "--input-shape", "4", "--batch-size", "16,32")
    well, failing = predicted(line, *own, "--workers", "1", "--strategy", "tree")["cells"]
    assert well["error"] is None
    assert "RuntimeError: not so many" in failing["error"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["lenet6"], "model"),
        (["lenet5", "--input-shape", "3x8x8"], "input_shape"),
        (["broken_in_forward:Broken", "--input-shape", "4"], "broken_in_forward:Broken"),
        (["broken_in_forward:Broken"], "input_shape"),
    ],
)
def test_a_refused_study_makes_no_folder(line, tmp_path, arguments, field):
    (tmp_path / "broken_in_forward.py").write_text(BROKEN)
    assert line("scale", *arguments, "--output", tmp_path / "study").refused == field
    assert not (tmp_path / "study").exists()


def test_the_same_command_reuses_its_cells(line, tmp_path):
    command = ("lenet5", "--batch-size", "16", "--strategy", "tree", "--workers", "1,2")
    first = predicted(line, *command)
    (written,) = tmp_path.glob("runs/*/cells.jsonl")
    before = written.read_text()
    assert predicted(line, *command) == first
    assert 2 in numbers(line.err)  # cells are reused
    assert written.read_text() == before


OVERHEAD, BESIDE = "Overhead of a method on one worker", "Prediction errors"


def result_of(cells: list[ScaleCell]) -> ScaleResult:
    return ScaleResult(
        id="20261122-030000-net-scale",
        paceline="0.1.0",
        settings=ScaleSettings(model="<net>", workers=(1, 2, 4), batch_size=(16,)),
        machine={"processor": "some"},
        cells=tuple(cells),
        findings=findings(of_study(cells)),
    )


def page(folder: Path, cells: list[ScaleCell]) -> str:
    result = result_of(cells)
    (folder / "result.json").write_text(result.model_dump_json())
    assert read_result(folder) == result
    return write_report(folder).read_text()


def shown(cells: list[ScaleCell]) -> Mapping[str, Any]:
    """Return the contents of the page of a study with these cells."""
    return page_of(result_of(cells)).content


def last(table: Table) -> list[str]:
    """Return the last cell of each row."""
    return [row[-1] for row in table.rows]


def percent(*shares: float) -> list[str]:
    return [f"{100 * one:.1f} %" for one in shares]


def test_the_page_draws_the_figures_and_names_what_failed(tmp_path):
    costs = {"allreduce": 10.0, "tree": 30.0}
    scalings = ("strong", "weak", "strong-per-worker")
    cells = [one for scaling in scalings for one in study(costs, (1, 2), scaling=scaling)]
    cells += [one.model_copy(update={"kind": Origin.PREDICTED}) for one in cells]
    all_failed = [failed(), failed("tree")]
    text, text_of_failures = (page(tmp_path, one) for one in ([*cells, *all_failed], all_failed))
    shown = [f'id="figure-{name}"' for name in (*scalings, "breakdowns")]
    shown += [f"<h2>{title}</h2>" for title in ("Synchronisation", OVERHEAD, BESIDE)]
    for one in (*shown, "worker 1 was ended by SIGKILL", "&lt;net&gt;"):
        assert one in text
    assert "<net>" not in text
    assert ("0 of 2" in text_of_failures, "plotly.js v" in text_of_failures) == (True, False)


NAMES = ("tree", "host", "allreduce")
MEASURED = ((10.0, (9.8, 10.2)), (10.1, (9.9, 10.4)), (12.18, (12.0, 12.3)))
PREDICTED = tuple((s, (0.87 * s, 1.13 * s)) for s in (10.0, 12.9, 13.1))  # with ranges of 13 %


@pytest.mark.parametrize(
    ("kind", "epochs", "overheads"),
    [("measured", MEASURED, [0.0, 1.0, 21.8]), ("predicted", PREDICTED, [0.0, 29.0, 31.0])],
)
def test_overheads_within_the_spread_are_marked(kind, epochs, overheads):
    cells = [
        cell(name, kind=kind, epoch_s=epoch_s, spread=spread)
        for name, (epoch_s, spread) in zip(NAMES, epochs, strict=True)
    ]
    (row,) = shown(cells)["overhead"].rows
    assert row[:3] == (kind, "16", "10.0 s")
    assert [numbers(one) for one in row[3:]] == [[one] for one in overheads]
    assert ["," in one for one in row[3:]] == [False, True, False]  # the second is marked
    # Users copy the number without the mark.
    assert row[4].value == pytest.approx(overheads[1])


@pytest.mark.parametrize(
    ("epochs_s", "mean", "errors"),
    [
        # Errors of 20 %, -10 % and 0 %: 10 % on average, without signs (3.3 % with signs).
        ([(12.0, 10.0), (18.0, 20.0), (5.0, 5.0)], 10.0, ["+20.0 %", "-10.0 %", "+0.0 %"]),
        # Relative to the measured value, not to the prediction.
        ([(20.0, 10.0)], 100.0, ["+100.0 %"]),
    ],
)
def test_predictions_have_errors_if_they_were_measured(epochs_s, mean, errors):
    cells = [cell("tree", 2, kind="predicted", epoch_s=1e6)]  # never measured
    for method, (predicted_s, found_s) in zip(NAMES, epochs_s, strict=False):
        cells.append(cell(method, kind="predicted", epoch_s=predicted_s))
        cells.append(cell(method, epoch_s=found_s))
    found = shown(cells)
    assert last(found["beside"]) == errors
    assert [row[0] for row in found["beside"].rows] == list(NAMES[: len(epochs_s)])
    assert 100 * found["mean_error"] == pytest.approx(mean)


def test_synchronisation_is_the_share_of_exposed_exchange_and_idle_time():
    waits = {"epoch_s": 8.0, "exposed_s": 0.5, "idle_s": 1.5, "hidden_s": 4.0}
    cells = [cell("host", 4, **waits | {"idle_s": 0.3}), cell("host", 2, **waits)]
    # Missing values are dashes, and each kind and scaling has its row.
    cells.append(cell("host", 4, kind="rehearsed", exposed_s=1.0, idle_s=0.0))
    cells.append(cell("host", 2, scaling="weak", exposed_s=3.0, idle_s=0.0))
    table = shown(cells)["synchronisation"]
    assert table.head[-2:] == ("2 w.", "4 w.")
    assert {row[2:4]: list(row[-2:]) for row in table.rows} == {
        ("strong", "measured"): percent(2.0 / 8, 0.8 / 8),
        ("strong", "rehearsed"): ["-", "10.0 %"],
        ("weak", "measured"): ["30.0 %", "-"],
    }
