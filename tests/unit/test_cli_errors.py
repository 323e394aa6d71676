import pytest

from command_line import MACHINE, steps, write_run
from paceline import api
from paceline.core.errors import WorkersFailed
from paceline.record.trace import write_trace


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
