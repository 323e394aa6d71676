import pytest

from command_line import MACHINE, steps, write_run
from paceline.api import planning
from paceline.core.errors import WorkersFailed
from paceline.record.trace import write_trace
from profiles import profile_result, write_profile

PACED = ("rehearse", "lenet5", "--device", "p100")
SEARCH = (*PACED, "--strategy", "host", "--chunk-search")


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
        (["plan", "lenet5", "--machine", MACHINE, "--workers", "0"], "workers: Input should be"),
        (["plan", "lenet5", "--machine", MACHINE, "--batch-size", "0"], "batch_size: Input should"),
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
            "input_shape.0: Input should be greater than or equal to 1, not 0",
        ),
        (
            ["plan", "lenet5", "--machine", MACHINE, "--input-shape", "1x-1x32"],
            "input_shape.1: Input should be greater than or equal to 1, not -1",
        ),
        (["plan", "lenet5", "--machine", MACHINE, "--input-shape", "9x9"], "lenet5 cannot run a"),
        (["plan", "lenet5", "--machine", MACHINE, "--data", "digits"], "data: nothing is measured"),
        (["plan", "lenet5", "--input-shape", "1x32x32"], "input_shape: the data say it"),
        (["plan", "torch.nn:ReLU", "--machine", MACHINE], "no trainable parameters"),
        (["compare", "none"], "none: there is no such folder; that of a run is named in"),
        (["compare", "run", "none"], "none: there is no such folder; that of a run is named in"),
        (["compare", "run", "plan"], "plan: holds a plan, not a run or a rehearsal"),
        (["compare", "run", "profile"], "profile: holds a profile, not a run or a rehearsal"),
        (["compare", "profile", "run"], "profile: holds a profile, not a run or a rehearsal"),
        (["compare", "run", "run", "profile"], "profile: holds a profile, not a run or a rehears"),
        (["compare", "empty"], "empty/trace.json: has no predicted timeline"),
        (["compare", "run", "empty"], "empty/trace.json: has no measured timeline"),
        (["compare", "short"], "short: a period needs two weight updates on one device"),
        (["compare", "run", "short"], "run or short: a period needs two weight updates"),
        (["report", "none"], "none: there is no such folder"),
        (["train", "lenet5", "--strategy", "magic"], "strategy: 'magic' is not known"),
        (["train", "lenet5", "--set", "bucket_mb"], "--set: 'bucket_mb' is not FIELD=VALUE"),
        (["train", "lenet5", "--strategy", "hots"], "did you mean 'host'? Choose one of allreduce"),
        (
            ["train", "lenet5", "--set", "nofield=1"],
            "strategy allreduce: field: 'nofield' is not known; choose one of bucket_mb",
        ),
        (["train", "lenet5", "--set", "bucket_md=1"], "did you mean 'bucket_mb'?"),
        (
            ["plan", "lenet5", "--machine", MACHINE, "--sweep", "bandwidth=1:2"],
            "sweep: 'bandwidth=1:2' is no range from less to more, such as bandwidth=100M:10G, in "
            "bits a second, or latency=10u:1m, in seconds: 1 has no unit",
        ),
        (["plan", "lenet5", "--machine", "two-core-epic"], "did you mean 'two-core-epyc'?"),
        (
            ["plan", "lenet5", "--machine", "misspelled.toml"],
            "devices.0.memory_byts: Extra inputs are not permitted, not '11.7 GiB'; did you mean "
            "'memory_bytes'?",
        ),
        (["train", "lenet5", "--set", "bucket_mb=big"], "strategy allreduce: bucket_mb: "),
        (["train", "lenet5", "--set", "workers=3"], "options: workers is a setting of its own"),
        (["train", "lenet5", "--profile-s", "inf"], "profile_s: "),
        (["rehearse", "lenet5"], "device, stretch: neither is given"),
        ([*PACED, "--stretch", "2"], "device, stretch: both are given"),
        (
            ["rehearse", "lenet5", "--device", "k99"],
            "device: 'k99' is not known; choose one of 8xh100",
        ),
        (["rehearse", "lenet5", "--device", "none.toml:a"], "none.toml: cannot be read: No such"),
        (
            ["rehearse", "lenet5", "--device", f"{MACHINE}:gpu"],
            "choose one of two-core-epyc/cpu0, two",
        ),
        (["rehearse", "lenet5", "--stretch", "0.5"], "stretch.0: Input should be greater than"),
        (["rehearse", "lenet5", "--stretch", "2", "--update-ms", "1"], "update_ms: goes only with"),
        ([*PACED, "--forward-ms", "0"], "forward_ms: Input should be greater than 0, not 0.0"),
        ([*PACED, "--backward-ms", "nan"], "backward_ms: "),
        ([*PACED, "--workers", "0"], "workers: Input should be greater than or equal to 1, not 0"),
        ([*PACED, "--workers", "9999", "--batch-size", "9999"], "workers: 9999 do not fit on"),
        ([*PACED, "--workers", "3", "--batch-size", "2"], "batch_size: 2 samples cannot be shared"),
        ([*PACED, "--steps", "2"], "steps: Input should be greater than or equal to 3, not 2"),
        ([*PACED, "--strategy", "magic"], "strategy: 'magic' is not known"),
        ([*PACED, "--set", "chunk=2"], "strategy allreduce: field: 'chunk' is not known"),
        ([*PACED, "--input-shape", "big"], "input_shape: 'big' is not a shape"),
        (
            [*PACED, "--chunk-search", "predicted"],
            "chunk_search: goes not with strategy allreduce, only with strategy host",
        ),
        ([*PACED, "--strategy", "hogbatch"], "strategy: 'hogbatch' cannot be rehearsed; choose"),
        ([*PACED, "--strategy", "auto"], "strategy: 'auto' is not known"),
        ([*PACED, "--profile-s", "0"], "profile_s: Input should be greater than 0, not 0"),
        (
            ["rehearse", "lenet5", "--strategy", "subbatch", "--stretch", "2"],
            "stretch: goes not with strategy subbatch, only with strategies allreduce, host, tree",
        ),
        (
            ["train", "lenet5", "--workers", "cpu:1,cpu:1"],
            "workers: 'cpu:1,cpu:1' is not a number; only strategy hogbatch takes a list",
        ),
        (["train", "lenet5", "--strategy", "auto", "--workers", "cpu:1"], "is not a number"),
        (
            ["train", "lenet5", "--strategy", "auto", "--force", "--policy", "adaptive"],
            "policy: goes not with strategy auto, only with strategy hogbatch",
        ),
        (
            ["train", "lenet5", "--strategy", "subbatch", "--codec", "all=half"],
            "codec: 'all' travels by none; choose from activations, ",
        ),
        ([*PACED, "--strategy", "host", "--chunk-search", "best"], "chunk_search: Input should be"),
        ([*SEARCH, "predicted", "--search-step", "2"], "search_step: goes only with chunk_search "),
        (
            [*SEARCH, "runtime", "--set", "chunk=2"],
            "chunk_search: looks for the chunk",
        ),
        ([*SEARCH, "runtime", "--workers", "1"], "chunk_search: a single worker exchanges nothing"),
        ([*PACED, "--interval", "2"], "interval: goes only with chunk_search"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(line, tmp_path, arguments, message):
    (tmp_path / "bad.toml").write_text("[[hosts]]")
    hosts, devices = MACHINE.read_text().split("[[devices]]", 1)
    misspelled = devices.replace("memory_bytes", "memory_byts", 1)
    (tmp_path / "misspelled.toml").write_text(f"{hosts}[[devices]]{misspelled}")
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "result.json").write_text('{"kind": "plan"}')
    write_run(tmp_path / "run", 1, 1)
    write_profile(tmp_path / "profile", profile_result())
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
        (KeyError("x"), 1, "paceline: KeyError: 'x' (this process at "),
        (KeyboardInterrupt(), 130, "paceline: interrupted\n"),
        (WorkersFailed(2), 2, ""),  # they have said it themselves
    ],
)
def test_other_ends_have_their_own_exit_codes(line, monkeypatch, error, code, said):
    monkeypatch.setattr(planning, "plan", raising(error))
    line("plan", "lenet5", "--machine", MACHINE)
    assert (line.code, line.out) == (code, "")
    assert line.err.startswith(said)
    assert line.err.count("\n") == bool(said)
