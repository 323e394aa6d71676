"""The parts of a study that need no run: its cells, its journal, and what is left of it."""

from pathlib import Path
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidInput
from paceline.records.scale import Point, ScaleSettings
from paceline.records.settings import validated
from paceline.studies.scale.journal import Journal, JournalHeader
from paceline.studies.scale.study_runs import RunStep, cell, run_arguments, runs
from paceline.studies.scale.study_terminal import remaining_s
from scale_cells import cell as some_cell
from scale_cells import failed

SETTINGS = ScaleSettings(model="lenet5", workers=(1, 2), batch_size=(16, 32))
HEADER = JournalHeader(id="one", paceline="0.1.0", settings=SETTINGS)
CELLS = [some_cell(), failed("tree"), some_cell("host", epoch_s=0.1 + 0.2)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repeats": 0}, "repeats: Input should be greater than or equal to 1, not 0"),
        (
            {"strategy": ("tree", "ring")},
            "'ring' is not known; choose one of allreduce, host, tree",
        ),
        ({"workers": (1, 0)}, "workers.1: Input should be greater than or equal to 1, not 0"),
        ({"batch_size": ()}, "batch_size: "),
        ({"batch_size": (16, 16)}, "16 stands there twice"),
        ({"scaling": ("strange",)}, "scaling.0: Input should be 'strong', 'strong-per-worker'"),
        ({"overhead": True, "workers": (2, 4)}, "overhead: is that of one worker"),
        ({"overhead": True, "predict": True}, "overhead: is measured or rehearsed"),
        ({"machine": "dgx1-v100"}, "machine: goes only with predict"),
    ],
)
def test_settings_that_cannot_be_are_named(fields, message):
    with pytest.raises(InvalidInput) as error:
        validated(ScaleSettings, {"model": "lenet5"} | fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ({}, ("measured",)),
        ({"predict": True}, ("predicted",)),
        ({"device": "v100"}, ("rehearsed",)),
        ({"device": "v100", "predict": True}, ("rehearsed", "predicted")),
        ({"measure": True, "predict": True}, ("measured", "predicted")),
        ({"measure": True, "device": "v100"}, ("measured", "rehearsed")),
    ],
)
def test_any_two_kinds_stand_side_by_side(asked, kinds):
    assert ScaleSettings(model="lenet5", **asked).kinds == kinds


def test_strong_scaling_keeps_the_samples_and_weak_scaling_the_batch_of_a_worker():
    strong, weak = Point("tree", 4, 16, "strong"), Point("tree", 4, 16, "weak")
    assert (strong.batch_size, weak.batch_size) == (16, 64)
    assert (strong.steps_of(1000), weak.steps_of(1000)) == (63, 63)


def test_strong_scaling_of_the_paper_keeps_the_batch_of_a_gpu_and_the_samples_of_an_epoch():
    # Section V-A: 256K images in batches of 16, 32 and 64 on each of 1, 2, 4 and 8 GPUs.
    for gpus in (1, 2, 4, 8):
        for batch in (16, 32, 64):
            point = Point("tree", gpus, batch, "strong-per-worker")
            assert point.batch_size == gpus * batch
            assert point.steps_of(262_144) == 262_144 // (gpus * batch)


def test_one_worker_exchanges_with_itself_where_a_study_asks_for_the_overhead():
    settings = ScaleSettings(model="lenet5", workers=(1, 2), batch_size=(8,), overhead=True)
    for run in runs(settings):
        asked = run_arguments(run, settings, (1, 32, 32), Path("there"))
        assert ("--exchange-alone" in asked) == (run.workers == 1)


@given(
    st.sets(st.integers(1, 8), min_size=1, max_size=4),
    st.sets(st.sampled_from([8, 16, 32, 64]), min_size=1),
    st.sampled_from([("strong",), ("weak",), ("strong", "weak"), ("strong-per-worker", "weak")]),
    st.booleans(),
    st.sampled_from([None, "v100"]),
)
def test_runs_give_each_cell_once_and_no_step_twice(workers, batches, scaling, predict, device):
    settings = ScaleSettings(
        model="lenet5",
        workers=tuple(workers),
        batch_size=tuple(batches),
        scaling=scaling,
        predict=predict,
        device=device,
    )
    found = list(runs(settings))
    given_cells = [(point, kind) for run in found for point in run.points for kind in run.kinds]
    wanted = [(point, kind) for point in settings.points for kind in settings.kinds]
    assert sorted(given_cells) == sorted(wanted)
    steps = [(run.source, run.method, run.workers, run.batch_size) for run in found]
    assert len(set(steps)) == len(steps)
    assert all(point.batch_size == run.batch_size for run in found for point in run.points)


def test_a_run_of_few_samples_has_one_for_each_class_and_one_that_predicts_few_steps():
    settings = replace_settings(classes=10, batch_size=(1,), workers=(1,), steps=6)
    (run, *_) = runs(settings)
    line = run_arguments(run, settings, (1, 32, 32), Path("there"))
    assert "synthetic:1x32x32,classes=10,samples=10" in line
    predicting = replace_settings(predict=True, batch_size=(16,), steps=50)
    (run, *_) = runs(predicting)
    assert "synthetic:1x32x32,classes=10,samples=80" in run_arguments(
        run, predicting, (1, 32, 32), Path("there")
    )


def test_a_model_with_data_of_its_own_is_trained_for_so_many_steps_of_them():
    settings = replace_settings(batch_size=(16,), workers=(1,), steps=6, model="own:recipe")
    (run, *_) = runs(settings)
    line = run_arguments(run, settings, None, Path("there"))
    assert line[:2] == ["train", "own:recipe"]
    assert line[line.index("--steps") + 1] == "6"
    assert not {"--data", "--epochs", "--learning-rate", "--input-shape"} & set(line)


def replace_settings(**fields) -> ScaleSettings:
    return SETTINGS.model_copy(update=fields)


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=9))
def test_a_cell_is_the_epoch_of_its_repetitions(seconds):
    parts = {"step": 9.0, "forward": 1.0, "backward": 2.0, "exposed": 0.5, "update": 0.25}
    parts |= {"idle": 0.25, "load": 0.0, "hidden": 7.0}
    steps = [RunStep(one, parts, 100) for one in seconds]
    found = cell(Point("tree", 2, 16, "strong"), "measured", steps, 1600, 1e9)
    assert min(seconds) * 100 <= found.epoch_s <= max(seconds) * 100 * (1 + 1e-12)
    if len(seconds) > 1:
        lower, middle, upper = quantiles(seconds, n=4, method="inclusive")
        assert found.spread == pytest.approx((100 * lower, 100 * upper))
        assert found.epoch_s == pytest.approx(100 * middle)
    else:
        assert found.spread == (found.epoch_s, found.epoch_s)
    whole = found.forward_s + found.backward_s + found.exposed_s + found.update_s + found.idle_s
    assert whole == pytest.approx(found.epoch_s)
    assert found.backward_s == pytest.approx(found.epoch_s / 2)


def test_finished_cells_are_there_again(tmp_path):
    with Journal(tmp_path / "study", HEADER) as journal:
        journal.append(CELLS[:1])
        journal.append(CELLS[1:])
    other = replace_header(id="two")
    with Journal(tmp_path / "study", other) as journal:
        assert list(journal.cells) == CELLS
        assert not journal.dropped
        assert journal.header.id == "one"


def replace_header(**fields) -> JournalHeader:
    return HEADER.model_copy(update=fields)


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_half_written_line_is_dropped_and_the_others_stay(tmp_path, cut):
    with Journal(tmp_path, HEADER) as journal:
        journal.append(CELLS)
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(tmp_path, HEADER) as journal:
        assert journal.dropped
        assert list(journal.cells) == CELLS[:2]
        journal.append(CELLS[2:])
    with Journal(tmp_path, HEADER) as journal:
        assert list(journal.cells) == CELLS
        assert not journal.dropped


def test_another_study_another_version_and_a_broken_journal_are_refused(tmp_path):
    with Journal(tmp_path, HEADER) as journal:
        journal.append(CELLS)
        with pytest.raises(InvalidInput, match="another study is under way"):
            Journal(tmp_path, HEADER)
    other = replace_header(settings=replace_settings(batch_size=(16,)))
    with pytest.raises(InvalidInput, match="was begun with batch_size 16,32, not 16; name"):
        Journal(tmp_path, other)
    with pytest.raises(InvalidInput, match=r"is of Paceline 0.1.0, and this is 0.2.0"):
        Journal(tmp_path, replace_header(paceline="0.2.0"))
    path = tmp_path / "cells.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(InvalidInput, match=r"cells.jsonl: line 1: method: Field required"):
        Journal(tmp_path, HEADER)
    (tmp_path / "study.json").write_text("[]")
    with pytest.raises(InvalidInput, match=r"study.json: "):
        Journal(tmp_path, HEADER)


@given(st.lists(st.floats(0.1, 1e4), min_size=2, max_size=20), st.floats(0.01, 100))
def test_the_remaining_time_is_right_where_expectations_are_off_alike(expected, ratio):
    assert remaining_s(expected, []) is None
    ended = [(seconds, ratio * seconds) for seconds in expected[:-1]]
    for number in range(1, len(expected)):
        left = remaining_s(expected, ended[:number])
        assert left == pytest.approx(ratio * sum(expected[number:]), rel=1e-6)
    assert remaining_s(expected, [*ended, (expected[-1], 1.0)]) == 0


def test_a_step_of_nothing_has_no_shares():
    assert set(RunStep(1.0, {"forward": 0.0}, 1).shares.values()) == {0.0}
