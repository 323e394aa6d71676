"""Scaling studies without processes: cells, runs, turns, journal."""

from pathlib import Path
from statistics import quantiles
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from findings import EXCHANGES, numbers, run
from paceline.core.timeline import Origin
from paceline.records.scale import Point, ScaleCell, ScaleResult, ScaleSettings
from paceline.report.scale import cells_table, sentences
from paceline.studies.scale.journal import Journal, JournalHeader
from paceline.studies.scale.study import ScalingStudy, do_runs
from paceline.studies.scale.study_runs import (
    Crashed,
    RunStep,
    StudyRun,
    cell,
    run_arguments,
    runs,
    steps_of,
)
from plan_rows import plan_row
from refusals import refused
from scale_cells import cell as some_cell
from scale_cells import failed

SETTINGS = ScaleSettings(model="lenet5", workers=(1, 2), batch_size=(16, 32))
HEADER = JournalHeader(id="one", paceline="0.1.0", settings=SETTINGS)
CELLS = [some_cell(), failed("tree"), some_cell("host", epoch_s=0.1 + 0.2)]
POINT, PARTS = Point("tree", 2, 16, "strong"), {"forward": 1.0, "backward": 2.0}


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ({}, ("measured",)),
        ({"kinds": "predicted"}, ("predicted",)),
        ({"device": "v100"}, ("rehearsed",)),
        ({"kinds": "measured,predicted"}, ("measured", "predicted")),
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
        return [some_cell(method=run.method, batch=run.batch_size)]


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
    found = cell(POINT, "measured", [RunStep(one, parts, 100) for one in seconds], 1600, 1e9)
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
    found = cell(POINT, Origin.PREDICTED, steps, 1600, 1e9)
    assert (found.epoch_s, found.spread) == (pytest.approx(epoch_s), pytest.approx(spread))


def test_a_run_has_the_range_of_its_own_plan():
    own, other = plan_row(step_s=20, range_share=0.2), plan_row(strategy="tree", range_share=0.6)
    found = steps_of(run(EXCHANGES, plans=(own, other), predicted_step_s=20, step_s=22))
    assert found[Origin.PREDICTED].range_s == pytest.approx((16, 24))
    assert found[Origin.MEASURED].range_s == (22, 22)


def test_the_spread_of_predicted_epochs_is_a_range(capsys):
    cells = [some_cell(kind=kind, spread=(9.0, 11.3)) for kind in ("measured", "predicted")]
    Console(width=80).print(cells_table(cells))
    _, heads, *rows = capsys.readouterr().out.splitlines()
    assert "range" in heads.split()
    assert all("9.00-11.3" in row for row in rows)
    (note,) = sentences(ScaleResult.model_construct(cells=cells, findings=()))
    assert numbers(note) == [9, 10]


def test_the_table_has_a_line_for_each_cell_in_80_columns(capsys):
    full = {"kind": "rehearsed", "workers": 128, "batch": 1024, "spread": (1111, 1346.4)}
    full |= {"epoch_s": 1234.4, "forward_s": 400, "backward_s": 800, "memory_bytes": 2**36}
    cells = [some_cell().model_copy(update=full | {"scaling": each}) for each in ("strong", "weak")]
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
