import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import pytest

from paceline import api, launching
from paceline.cli import main
from paceline.core.compare import compare
from paceline.core.errors import WorkersFailed
from paceline.core.plan import Kind, Resource
from paceline.core.timeline import Span, Timeline
from paceline.record.trace import write_trace
from paceline.result import ComparisonTable, EpochRow, PlanRow, Result
from paceline.settings import TrainSettings

MACHINE = Path(__file__).parents[2] / "machines" / "two-core-epyc.toml"
COMPUTE = (Resource("cpu0", "compute"),)


class Line:
    """The command line in this process: call it and look at `code`, `out` and `err`."""

    def __init__(self, monkeypatch, capsys) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> "Line":
        self._monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        self.code = ended.value.code or 0
        self.out, self.err = self._capsys.readouterr()
        return self


@pytest.fixture
def line(monkeypatch, capsys, tmp_path) -> Line:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Line(monkeypatch, capsys)


def steps(seconds: float, origin, num_steps: int = 3) -> Timeline:
    spans = []
    for i in range(num_steps):
        start, middle, end = (seconds * (i + part) for part in (0, 0.5, 1))
        spans += [
            Span(f"s{i}/forward[a]@worker0", Kind.FORWARD, COMPUTE, start, middle, "a"),
            Span(f"s{i}/step@worker0", Kind.STEP, COMPUTE, middle, end),
        ]
    return Timeline(spans, origin)


def write_run(folder: Path, predicted_s: float, measured_s: float) -> Path:
    folder.mkdir()
    timelines = steps(predicted_s, "predicted"), steps(measured_s, "measured")
    write_trace(folder / "trace.json", timelines)
    row = PlanRow(
        strategy="allreduce",
        workers=1,
        step_s=predicted_s,
        samples_per_s=1,
        wire_nbytes_per_step=0,
        why="computes",
    )
    result = Result(
        id=folder.name,
        settings=TrainSettings(model="lenet5", workers=1),
        machine={"processor": "some"},
        plans=(row,),
        epochs=(EpochRow(number=0, train_loss=2, test_loss=1, accuracy=0.5, seconds=3),),
        accuracy=0.5,
        predicted_step_s=predicted_s,
        measured_step_s=measured_s,
        samples_per_s=1,
        comparison=ComparisonTable.of(compare(*timelines)),
        faults=(),
        peak_memory_bytes=(1,),
    )
    (folder / "result.json").write_text(result.model_dump_json())
    return folder


def test_a_machine_is_planned_for_as_one_json_object(line):
    line("plan", "alexnet", "--machine", MACHINE, "--batch-size", 32, "--json")
    assert (line.code, line.err) == (0, "")
    plan = json.loads(line.out)
    assert (plan["model"], plan["batch_size"], plan["origin"]) == ("alexnet", 32, "predicted")
    rows = {row["workers"]: row for row in plan["plans"]}
    assert set(rows) == {1, 2}
    rates = [row["samples_per_s"] for row in plan["plans"]]
    assert rates == sorted(rates, reverse=True)
    # 60,965,224 parameters (Krizhevsky 2012 in one column): two ranks send all through one link.
    assert rows[2]["wire_nbytes_per_step"] == 2 * 4 * 60_965_224
    assert rows[1]["wire_nbytes_per_step"] == 0
    for workers, row in rows.items():
        assert row["samples_per_s"] == pytest.approx(32 / row["step_s"])
        assert workers > 1 or "nothing is exchanged" in row["why"]


def test_a_plan_is_a_table_for_people(line):
    line("plan", "lenet5", "--machine", MACHINE)
    assert line.code == 0
    for text in ("lenet5 predicted on", "allreduce", "samples/s", "482 KiB", "computes"):
        assert text in line.out


def test_the_number_of_workers_can_be_chosen(line):
    line("plan", "lenet5", "--machine", MACHINE, "--workers", 2, "--json")
    assert [row["workers"] for row in json.loads(line.out)["plans"]] == [2]


def test_every_number_of_workers_that_a_machine_allows_can_be_chosen(line, tmp_path):
    # Without a wish only some of many numbers are looked at.
    text = MACHINE.read_text().replace("cores = 2", "cores = 20")
    start, device = text.index("[[devices]]"), text[text.index("[[devices]]") :]
    one = device[: device.index("[[devices]]", 1)]
    links = text[text.index("[[links]]") :]
    devices = "".join(one.replace('"cpu0"', f'"cpu{i}"') for i in range(20))
    (tmp_path / "twenty.toml").write_text(text[:start] + devices + links)
    line("plan", "lenet5", "--machine", "twenty.toml", "--json")
    assert line.code == 0, line.err
    seen = sorted(row["workers"] for row in json.loads(line.out)["plans"])
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    line("plan", "lenet5", "--machine", "twenty.toml", "--workers", 9, "--json")
    assert line.code == 0, line.err
    assert [row["workers"] for row in json.loads(line.out)["plans"]] == [9]


def test_a_run_is_compared_with_its_prediction(line, tmp_path):
    folder = write_run(tmp_path / "run", 1.5, 2.0)
    line("compare", folder, "--json")
    assert (line.code, line.err) == (0, "")
    table = json.loads(line.out)
    assert (table["left"], table["right"]) == ("predicted", "measured")
    first = table["rows"][0]
    assert first["quantity"] == "step"
    assert (first["left_s"], first["right_s"]) == pytest.approx((1.5, 2.0))
    assert first["error"] == pytest.approx(-0.25)


def test_two_runs_are_compared_as_they_were_measured(line, tmp_path):
    one, other = write_run(tmp_path / "one", 1, 3), write_run(tmp_path / "other", 7, 4)
    line("compare", one, other, "--json")
    table = json.loads(line.out)
    assert (table["left"], table["right"]) == ("one", "other")
    assert (table["rows"][0]["left_s"], table["rows"][0]["right_s"]) == pytest.approx((3, 4))
    line("compare", one, other)
    assert line.code == 0
    for text in ("Seconds per step", "one", "other", "forward", "-25.0%"):
        assert text in line.out


def test_a_report_is_written_anew_and_its_path_printed(line, tmp_path):
    folder = write_run(tmp_path / "run", 1, 1)
    line("report", folder)
    assert (line.code, line.err) == (0, "")
    assert line.out == f"{folder}/report.html\n"
    assert "lenet5" in (folder / "report.html").read_text()
    line("report", folder, "--json")
    assert json.loads(line.out) == {"report": f"{folder}/report.html"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "No such command 'dance'"),
        (["plan"], "Missing argument 'model'"),
        (["plan", "lenet5", "--speed", "3"], "--speed"),
        (["plan", "lenet5", "--batch-size", "few"], "--batch-size"),
        (["plan", "lenet6", "--machine", MACHINE], "did you mean 'lenet5'?"),
        (["plan", "lenet5", "--machine", "none.toml"], "none.toml: cannot be read: No such file"),
        (["plan", "lenet5", "--machine", "."], ".: cannot be read: Is a directory"),
        (["plan", "lenet5", "--machine", "bad.toml"], "bad.toml: name: Field required"),
        (["plan", "lenet5", "--machine", MACHINE, "--workers", "3"], "workers: 3 do not fit"),
        (["plan", "lenet5", "--machine", MACHINE, "--workers", "0"], "workers: 0 do not fit"),
        (["plan", "lenet5", "--machine", MACHINE, "--batch-size", "0"], "batch_size: must be at"),
        (
            ["plan", "lenet5", "--machine", MACHINE, "--batch-size", "1", "--workers", "2"],
            "workers: 2 do not fit",
        ),
        (
            ["plan", "lenet5", "--machine", MACHINE, "--input-shape", "big"],
            "input_shape: 'big' is not a shape such as 3x224x224",
        ),
        (
            ["plan", "lenet5", "--machine", MACHINE, "--input-shape", "0x32x32"],
            "input_shape: sizes must be at least 1",
        ),
        (
            ["plan", "lenet5", "--machine", MACHINE, "--input-shape", "1x-1x32"],
            "input_shape: sizes must be at least 1",
        ),
        (["plan", "lenet5", "--machine", MACHINE, "--input-shape", "9x9"], "lenet5 cannot run a"),
        (["plan", "lenet5", "--input-shape", "1x32x32"], "input_shape: the data say it"),
        (["plan", "torch.nn:ReLU", "--machine", MACHINE], "no trainable parameters"),
        (["compare", "none"], "none/trace.json: cannot be read: No such file"),
        (["compare", "run", "none"], "none/trace.json: cannot be read: No such file"),
        (["compare", "empty"], "empty/trace.json: has no predicted timeline"),
        (["compare", "run", "empty"], "empty/trace.json: has no measured timeline"),
        (["compare", "short"], "short: a period needs two weight updates on one device"),
        (["compare", "run", "short"], "run or short: a period needs two weight updates"),
        (["report", "none"], "none/result.json: cannot be read: No such file"),
        (["train", "lenet5", "--strategy", "magic"], "strategy: 'magic' is not known"),
        (["train", "lenet5", "--set", "bucket_mb"], "--set: 'bucket_mb' is not FIELD=VALUE"),
        (["train", "lenet5", "--set", "bucket_mb=big"], "strategy allreduce: bucket_mb: "),
        (["train", "lenet5", "--set", "workers=3"], "options: workers is a setting of its own"),
        (["train", "lenet5", "--profile-s", "inf"], "profile_s: "),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(line, tmp_path, arguments, message):
    (tmp_path / "bad.toml").write_text("[[hosts]]")
    write_run(tmp_path / "run", 1, 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "short").mkdir()
    one = steps(1, "predicted", 1), steps(1, "measured", 1)
    write_trace(tmp_path / "short" / "trace.json", one)
    line(*arguments)
    assert line.code == 2, line.err
    assert line.out == ""
    assert line.err.startswith("paceline: ")
    assert line.err.count("\n") == 1
    assert message in line.err
    assert not (tmp_path / "runs").exists()


def test_debug_shows_where_an_error_was_raised(line):
    line("plan", "lenet5", "--machine", "none.toml", "--debug")
    assert line.code == 2
    assert "Traceback (most recent call last)" in line.err
    assert line.err.splitlines()[-1].startswith("paceline: none.toml: cannot be read")


def raising(error: BaseException):
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("x"), 1, "paceline: internal error: KeyError('x') (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "paceline: interrupted\n"),
        (WorkersFailed(2), 2, ""),  # they have said it themselves
    ],
)
def test_other_ends_have_their_own_exit_codes(line, monkeypatch, error, code, said):
    monkeypatch.setattr(api, "plan", raising(error))
    line("plan", "lenet5", "--machine", MACHINE)
    assert (line.code, line.out, line.err) == (code, "", said)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ([], "train    Profile, plan and train a model"),
        (["--help"], "train    Profile, plan and train a model"),
        (["train", "--help"], "--set FIELD=VALUE"),
        (["plan", "--help"], "--machine <path>"),
        (["compare", "--help"], "[second]"),
        (["report", "--help"], "{folder}"),
        (["--version"], version("paceline")),
    ],
)
def test_help_is_no_error(line, command, text):
    line(*command)
    assert (line.code, line.err) == (0, "")
    assert text in line.out


def test_settings_of_a_run_are_those_of_the_command_line(line, monkeypatch, tmp_path):
    orders = []
    monkeypatch.setattr(launching, "carry_out", orders.append)
    options = ["--set", "bucket_mb=5", "--set", "gradient_as_bucket_view=false", "--seed", 7]
    line("train", "lenet5", "--epochs", 2, "--learning-rate", 0.5, "--output", tmp_path, *options)
    assert line.code == 0, line.err
    (order,) = orders
    expected = TrainSettings(
        model="lenet5",
        epochs=2,
        learning_rate=0.5,
        output=tmp_path,
        seed=7,
        options={"bucket_mb": 5, "gradient_as_bucket_view": False},
    )
    assert (order.verb, order.settings, order.as_json) == ("train", expected, False)
    monkeypatch.setenv("WORLD_SIZE", "3")  # as many as torchrun has started
    line("plan", "lenet5", "--json")
    assert (orders[1].verb, orders[1].settings.workers, orders[1].as_json) == ("plan", 3, True)


@pytest.mark.parametrize("code", [0, 2])
def test_a_rank_of_torchrun_ends_at_once(line, monkeypatch, code):
    # Threads of a process group can abort a process that takes the usual way out.
    def leave(code: int) -> NoReturn:
        raise SystemExit(f"left with {code}")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(launching, "work", lambda order: code)
    monkeypatch.setattr(launching, "leave", leave)
    line("train", "lenet5")
    assert line.code == f"left with {code}"
