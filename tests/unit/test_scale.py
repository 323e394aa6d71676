"""Scaling studies without processes: cells, runs, turns, journal, commands and pages."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import quantiles
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from command_line import MACHINE
from findings import EXCHANGES, numbers, run
from paceline.core.timeline import Origin
from paceline.planner import forecast
from paceline.records.machine_file import read_machine
from paceline.records.result import read_result
from paceline.records.scale import Point, ScaleCell, ScaleResult, ScaleSettings
from paceline.report import write_report
from paceline.report.advice import findings
from paceline.report.metrics import of_study
from paceline.report.scale import cells_table, page_of, sentences
from paceline.strategies import find_exchange
from paceline.studies.scale.journal import Journal, JournalHeader
from paceline.studies.scale.study import ScalingStudy, do_runs, study_of
from paceline.studies.scale.study_runs import (
    Crashed,
    RunStep,
    StudyRun,
    run_arguments,
    runs,
    steps_of,
)
from paceline.studies.scale.study_runs import cell as cell_of
from plan_rows import plan_row
from refusals import refused
from scale_cells import cell, failed, model_source, study

SETTINGS = ScaleSettings(model="lenet5", workers=(1, 2), batch_size=(16, 32))
HEADER = JournalHeader(id="one", paceline="0.1.0", settings=SETTINGS)
CELLS = [cell(), failed("tree"), cell("host", epoch_s=0.1 + 0.2)]
POINT, PARTS = Point("tree", 2, 16, "strong"), {"forward": 1.0, "backward": 2.0}


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ({}, ("measured",)),
        ({"device": "v100"}, ("rehearsed",)),
        ({"kinds": "rehearsed,measured", "device": "v100"}, ("rehearsed", "measured")),
    ],
)
def test_kinds_are_as_asked_or_follow_from_the_device(asked, kinds):
    assert ScaleSettings(model="lenet5", **asked).kinds == kinds


def test_scaling_keeps_the_samples_or_the_batch_of_a_worker():
    strong, weak = Point("tree", 4, 32, "strong"), Point("tree", 4, 32, "weak")
    assert (strong.batch_size, weak.batch_size) == (32, 128)
    assert strong.steps_of(1000) == weak.steps_of(1000) == 32
    # Mojumder et al., section V-A: 256K images; the batch size is that of each GPU.
    published = Point("tree", 4, 32, "strong-per-worker")
    assert (published.batch_size, published.steps_of(262_144)) == (128, 2048)


@given(
    st.builds(
        ScaleSettings,
        model=st.just("lenet5"),
        workers=st.sets(st.integers(1, 8), min_size=1, max_size=4).map(tuple),
        batch_size=st.sets(st.sampled_from([8, 16, 32, 64]), min_size=1).map(tuple),
        scaling=st.sampled_from(
            [("strong",), ("weak",), ("strong", "weak"), ("strong-per-worker", "weak")]
        ),
    ),
    st.sets(st.sampled_from(Origin), min_size=1).map(tuple),
)
def test_runs_give_each_cell_once_and_no_step_twice(settings, kinds):
    settings = settings.model_copy(update={"kinds": kinds})
    found = list(runs(settings))
    given_cells = [(point, kind) for run in found for point in run.points for kind in run.kinds]
    wanted = [(point, kind) for point in settings.points for kind in settings.kinds]
    assert sorted(given_cells) == sorted(wanted)
    steps = [(run.source, run.method, run.workers, run.batch_size) for run in found]
    assert len(set(steps)) == len(steps)
    assert all(point.batch_size == run.batch_size for run in found for point in run.points)


def changed(**fields) -> ScaleSettings:
    return SETTINGS.model_copy(update=fields)


@pytest.mark.parametrize(
    ("fields", "samples"),
    [  # at least one per class; predictions take few steps
        ({"classes": 10, "batch_size": (1,), "workers": (1,), "steps": 6}, 10),
        ({"kinds": (Origin.PREDICTED,), "batch_size": (16,), "steps": 50}, 80),
    ],
)
def test_a_run_has_as_many_synthetic_samples_as_it_needs(fields, samples):
    settings = changed(**fields)
    (one, *_) = runs(settings)
    line = run_arguments(one, settings, (1, 32, 32), Path("there"))
    assert f"synthetic:1x32x32,classes=10,samples={samples}" in line


class Turns:
    """A study whose runs take no time; `order` lists them."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int, int]] = []

    def repeats(self, run: StudyRun) -> int:
        return 3

    def repetition(self, run: StudyRun, number: int, folder: Path) -> dict:
        self.order.append((run.method, run.batch_size, number))
        if (run.method, number) == ("tree", 2):
            raise Crashed("gone")
        return {"measured": number}

    def cells(self, run: StudyRun, steps: list[dict]) -> list[ScaleCell]:
        assert [one["measured"] for one in steps] == [1, 2, 3]
        return [cell(method=run.method, batch=run.batch_size)]


def test_repetitions_of_methods_take_turns_and_a_failed_method_is_left_out(tmp_path):
    settings = changed(workers=(1,), strategy=("allreduce", "tree", "host"))
    turns = Turns()
    done = do_runs(cast("ScalingStudy", turns), list(runs(settings)), tmp_path, lambda run: None)
    ended = [(run.method, run.batch_size, cells[0].error) for run, cells in done if cells]
    turn = "allreduce 1, tree 1, host 1, tree 2, host 2, allreduce 2, host 3, allreduce 3"
    first = [one.split() for one in turn.split(", ")]
    assert turns.order == [(method, size, int(n)) for size in (16, 32) for method, n in first]
    errors = (("tree", "gone"), ("host", None), ("allreduce", None))
    assert ended == [(method, size, error) for size in (16, 32) for method, error in errors]


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=9))
def test_a_cell_has_the_median_and_quartiles_of_its_repetitions(seconds):
    parts = {"step": 9.0, "forward": 1.0, "backward": 2.0, "exposed": 0.5, "update": 0.25}
    parts |= {"idle": 0.25, "load": 0.0, "hidden": 7.0}
    found = cell_of(POINT, "measured", [RunStep(one, parts, 100) for one in seconds], 1600, 1e9)
    quartiles = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    assert (found.spread[0], found.epoch_s, found.spread[1]) == pytest.approx(
        tuple(100 * one for one in quartiles)
    )
    whole = found.forward_s + found.backward_s + found.exposed_s + found.update_s + found.idle_s
    assert whole == pytest.approx(found.epoch_s)
    assert found.backward_s == pytest.approx(found.epoch_s / 2)
    assert set(RunStep(1.0, {"forward": 0.0}, 1).shares.values()) == {0.0}


@pytest.mark.parametrize(
    ("ranges", "epoch_s", "spread"),
    [
        # Lower ends of 0.77, 0.9 and 0.96 s, upper ends of 1.1, 1.43 and 1.44 s: their quartiles.
        ({1.0: 0.1, 1.2: 0.2, 1.1: 0.3}, 110, (83.5, 143.5)),
        ({1.0: 1.5}, 100, (0.0, 250.0)),  # from a noisy profile; a time is not negative
    ],
)
def test_predictions_of_several_runs_have_the_quartiles_of_their_ranges(ranges, epoch_s, spread):
    steps = [RunStep(seconds, PARTS, 100, within) for seconds, within in ranges.items()]
    found = cell_of(POINT, Origin.PREDICTED, steps, 1600, 1e9)
    assert (found.epoch_s, found.spread) == (pytest.approx(epoch_s), pytest.approx(spread))


def test_a_run_has_the_range_of_its_own_plan():
    own, other = plan_row(step_s=20, range_share=0.2), plan_row(strategy="tree", range_share=0.6)
    found = steps_of(run(EXCHANGES, plans=(own, other), predicted_step_s=20, step_s=22))
    assert found[Origin.PREDICTED].range_s == pytest.approx((16, 24))
    assert found[Origin.MEASURED].range_s == (22, 22)


def test_the_spread_of_predicted_epochs_is_a_range(capsys):
    cells = [cell(kind=kind, spread=(9.0, 11.3)) for kind in ("measured", "predicted")]
    Console(width=80).print(cells_table(cells))
    assert "range" in capsys.readouterr().out.splitlines()[1].split()
    (note,) = sentences(ScaleResult.model_construct(cells=cells, findings=()))
    assert numbers(note) == [9, 10]


def test_the_table_has_a_line_for_each_cell_in_80_columns(capsys):
    full = {"kind": "rehearsed", "workers": 128, "batch": 1024, "spread": (1111, 1346.4)}
    full |= {"epoch_s": 1234.4, "forward_s": 400, "backward_s": 800, "memory_bytes": 2**36}
    cells = [cell().model_copy(update=full | {"scaling": each}) for each in ("strong", "weak")]
    Console(width=80).print(cells_table([*cells, failed("tree")]))
    title, heads, *rows = capsys.readouterr().out.splitlines()
    assert "quartiles" in heads.split()
    assert all(kind in title for kind in ("rehearsed", "measured", "MiB"))
    first, second, last = (row.split() for row in rows)
    whole = ["allreduce", "128", "1024", "rehearsed", "1,234", "1,111-1,346", "1,200", "0.500"]
    assert first == [*whole, "65,536"]
    assert second == [*whole[:3], "each", *whole[3:], "65,536"]
    assert last[-1] == "failed"


@pytest.mark.parametrize("cut", [0, 1, 2, 40])
def test_finished_cells_are_there_again_but_for_a_half_written_line(tmp_path, cut):
    with Journal(tmp_path / "study", HEADER) as journal:
        journal.append(CELLS[:1])
        journal.append(CELLS[1:])
    path = tmp_path / "study" / "cells.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    with Journal(tmp_path / "study", HEADER.model_copy(update={"id": "two"})) as journal:
        assert (journal.dropped, journal.header.id) == (bool(cut), "one")
        assert list(journal.cells) == (CELLS[:2] if cut else CELLS)
        journal.append(CELLS[len(journal.cells) :])
    with Journal(tmp_path / "study", HEADER) as journal:
        assert list(journal.cells) == CELLS
        assert not journal.dropped


def test_another_study_another_version_and_a_broken_journal_are_refused(tmp_path):
    def opens(field: object, **changes: object) -> str:
        with refused(field) as caught:
            Journal(tmp_path, HEADER.model_copy(update=changes))
        return caught.value.problem

    with Journal(tmp_path, HEADER) as journal:
        journal.append(CELLS)
        opens("output")  # the study is running
    assert "batch_size 16,32" in opens("output", settings=changed(batch_size=(16,)))
    assert "0.2.0" in opens("output", paceline="0.2.0")
    path = tmp_path / "cells.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    assert "method" in opens(f"{path}: line 1")
    (tmp_path / "study.json").write_text("[]")
    opens(tmp_path / "study.json")


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


def test_the_page_draws_the_figures_and_names_what_failed(tmp_path):
    costs = {"allreduce": 10.0, "tree": 30.0}
    scalings = ("strong", "weak", "strong-per-worker")
    cells = [one for scaling in scalings for one in study(costs, (1, 2), scaling=scaling)]
    cells += [one.model_copy(update={"kind": Origin.PREDICTED}) for one in cells]
    all_failed = [failed(), failed("tree")]
    text, text_of_failures = (page(tmp_path, one) for one in ([*cells, *all_failed], all_failed))
    shown = [f'id="figure-{name}"' for name in (*scalings, "breakdowns")]
    titles = ("Synchronisation", "Overhead of a method on one worker", "Prediction errors")
    shown += [f"<h2>{title}</h2>" for title in titles]
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
    rows = [(row[0], row[-1]) for row in found["beside"].rows]
    assert rows == list(zip(NAMES, errors, strict=False))
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
        ("strong", "measured"): ["25.0 %", "10.0 %"],  # 2.0 and 0.8 of 8 s
        ("strong", "rehearsed"): ["-", "10.0 %"],
        ("weak", "measured"): ["30.0 %", "-"],
    }
