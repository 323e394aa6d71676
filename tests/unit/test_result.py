import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from paceline.core.compare import compare
from paceline.core.cost import compute_lane
from paceline.core.errors import InvalidInput
from paceline.core.outcome import ChunkTrial, Epoch
from paceline.core.plan import Kind
from paceline.core.settings import TrainSettings
from paceline.core.timeline import Origin, Span, Timeline
from paceline.records.result import RunResult, read_result
from paceline.report.terminal import comparison_table, result_tables, show_plans
from plan_rows import plan_row

COMPUTE = (compute_lane("cpu0"),)


def steps(seconds: float, origin) -> Timeline:
    """Three updates, one every `seconds`, with as long a forward pass before each."""
    spans = []
    for i in range(3):
        start, middle = i * seconds, (i + 0.5) * seconds
        spans += [
            Span(Kind.FORWARD, i, "a", 0, COMPUTE, start, middle),
            Span(Kind.STEP, i, "", 0, COMPUTE, middle, (i + 1) * seconds),
        ]
    return Timeline(spans, origin)


RESULT = RunResult(
    origin="measured",
    id="20261121-000000-lenet5-abcd",
    settings=TrainSettings(model="lenet5", options={"bucket_mb": 5}),
    strategy="allreduce",
    machine={"processor": "some", "cores": 2, "instruction_sets": ["avx2"]},
    plans=(
        plan_row(
            strategy="allreduce",
            workers=2,
            step_s=0.011,
            samples_per_s=5818,
            wire_nbytes_per_step=493_648,
            why="computes 90 % of the step",
        ),
    ),
    epochs=(Epoch(number=0, train_loss=2.0, test_loss=1.0, score=0.5, seconds=3.0),),
    accuracy=0.5,
    predicted_step_s=0.011,
    step_s=0.010,
    samples_per_s=6400,
    comparison=compare(steps(1.5, "predicted"), steps(2.0, "measured")),
    peak_memory_bytes=(1, 2),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "result.json").write_text(RESULT.model_dump_json(indent=2))
    return tmp_path


def test_a_result_is_read_as_it_was_written(folder):
    assert read_result(folder) == RESULT


def test_the_figures_have_the_names_that_users_look_for(folder):
    written = json.loads((folder / "result.json").read_text())
    assert written["accuracy"] == 0.5
    assert written["predicted_step_s"] == 0.011
    assert (written["origin"], written["step_s"]) == ("measured", 0.010)
    assert written["samples_per_s"] == 6400
    assert written["settings"]["options"] == {"bucket_mb": 5}


def test_the_prediction_error_is_that_of_the_prediction():
    assert RESULT.prediction_error == pytest.approx(0.1)


def test_a_comparison_keeps_both_sides_and_the_error_of_the_left():
    table = RESULT.comparison
    assert (table.left, table.right) == ("predicted", "measured")
    rows = {row.quantity: (row.left_s, row.right_s, row.error) for row in table.rows}
    assert rows["step"] == (1.5, 2.0, -0.25)
    assert rows["forward"] == (0.75, 1.0, -0.25)
    assert rows["exposed"] == (0, 0, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "walk"}, "kind: Input should be 'run', 'plan', 'profile' or 'scale', not 'walk'"),
        ({"step_s": "short"}, "step_s: Input should be a valid number"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        (
            {"settings": {"kind": "train", "model": "lenet5", "workers": 0}},
            "settings.train: workers: Input should be greater than or equal to 1",
        ),
        ({"epochs": [{}]}, "epochs.0.number: Field required"),
    ],
)
def test_a_damaged_result_is_refused_with_file_and_field(folder, change, message):
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidInput, match=rf"result\.json: {message}") as error:
        read_result(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"id": "\xff"}'])
def test_a_file_that_is_no_result_is_refused_with_its_name(folder, content):
    (folder / "result.json").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"result\.json: ") as error:
        read_result(folder)
    assert "\n" not in str(error.value)


def test_a_missing_result_is_refused_with_its_name(tmp_path):
    with pytest.raises(InvalidInput, match=r"result\.json: cannot be read: No such file"):
        read_result(tmp_path)


def cells(table) -> list[list[str]]:
    return [list(column.cells) for column in table.columns]


def test_of_codecs_the_table_shows_the_fastest():
    plain = RESULT.plans[0]
    codecs = ["dynamic8", "half", None, "bfloat16"]
    rows = [plain.model_copy(update={"codec": codec}) for codec in codecs]
    rows += [row.model_copy(update={"workers": 4}) for row in rows[1:2]]
    words = [line.split() for line in printed(rows).splitlines() if "ms" in line or "+" in line]
    shown = [line[:3] if line[0] in "123" else line for line in words][:5]
    assert shown == [
        ["1", "allreduce", "2"],
        ["+", "dynamic8"],
        ["2", "allreduce", "2"],
        ["3", "allreduce", "4"],
        ["+", "half"],
    ]


def printed(rows) -> str:
    """What 80 columns show of plans."""
    out = Console(file=StringIO(), width=80)
    show_plans(out, rows, "title")
    return out.file.getvalue()


def test_a_plan_fits_into_a_terminal_and_says_why():
    row = RESULT.plans[0].model_copy(
        update={"placement": "spread", "memory_nbytes": {"cpu0": 2**30, "cpu1": 7}}
    )
    text = printed([row])
    assert max(map(len, text.splitlines())) <= 80
    cells = ("allreduce", "2", "11.0 ms", "5,818", "90 %", "1.00 ms", "482 KiB", "1.00 GiB")
    assert all(cell in text for cell in cells)
    assert "(spread)" in text
    assert " 1: computes 90 % of the step" in text


def test_of_many_plans_the_best_are_shown():
    rows = [RESULT.plans[0].model_copy(update={"workers": n}) for n in range(1, 16)]
    assert "and 3 slower plans; --json has them all" in printed(rows)


def test_two_timelines_are_compared_with_units():
    quantity, left, right, error = cells(comparison_table(RESULT.comparison))
    assert (quantity[0], left[0], right[0], error[0]) == ("step", "1.50 s", "2.00 s", "-25.0 %")
    assert error[quantity.index("exposed")] == ""


def test_the_summary_says_accuracy_and_prediction_beside_measurement():
    *_, text = result_tables(RESULT, "runs/x")
    assert "50.0 %" in text
    assert "predicted 11.0 ms (9.57 ms to 12.4 ms), measured 10.0 ms (+10.0 %)" in text
    assert "the median of the untraced steps" in text
    assert "6,400 samples/s with 2 workers" in text
    assert "runs/x/result.json" in text


def test_a_prediction_that_is_many_times_off_is_said_as_times():
    far = RESULT.model_copy(update={"predicted_step_s": 2.52, "plans": ()})
    *_, text = result_tables(far, "runs/x")
    assert "predicted 2.52 s, measured 10.0 ms (252 times), the median" in text


@pytest.mark.parametrize(("workers", "counted"), [(1, "1 worker"), (2, "2 workers")])
def test_workers_and_places_are_counted_in_plain_english(workers, counted):
    own = {"settings": TrainSettings(model="lenet5", workers=workers)}
    *_, text = result_tables(RESULT.model_copy(update=own), "runs/x")
    assert f"6,400 samples/s with {counted}\n" in text
    rehearsed = own | {"origin": Origin.REHEARSED, "devices": "as k40", "faults": ("late",)}
    *_, text = result_tables(RESULT.model_copy(update=rehearsed), "runs/x")
    assert f"no training: {counted} as k40\n" in text
    assert "the trace departs from it in 1 place\n" in text


def test_of_a_search_for_the_chunk_the_chosen_size_is_marked():
    trials = (ChunkTrial(6, 0.25, 0.2), ChunkTrial(4, 0.3, 0.004))
    result = RESULT.model_copy(update={"trials": trials, "config": {"chunk": 6}})
    table, *_ = result_tables(result, "runs/x")
    rows = [["6", "4"], ["250 ms", "300 ms"], ["200 ms", "4.00 ms"], ["chosen", ""]]
    assert cells(table) == rows
