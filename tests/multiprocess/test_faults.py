"""Workers that die, and whatever else goes wrong in a run: one clear line, and nothing left."""

import os
import signal
import socket
import time

import pytest

LONG = ("--profile-s", "0.2", "--epochs", "1000")


def wait_for(condition, deadline_s: float = 600.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def training(start, *extra: str):
    """Start a run that would take minutes, and return it once it trains."""
    run = start("-m", "paceline", "train", "lenet5", *LONG, *extra)
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch 1/") for line in lines)
    return run


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_ends_the_run_before_any_deadline(start, victim: int):
    run = training(start, "--deadline-s", "1000")
    workers = run.workers()
    assert len(workers) == 2
    killed = time.monotonic()
    os.kill(workers[victim], signal.SIGKILL)
    done = run.finish()
    assert time.monotonic() - killed < 500
    assert done.code == 1
    lines = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    dead = f"worker {victim} (process {workers[victim]})"
    assert sorted(lines) == sorted(
        [
            f"paceline: worker {1 - victim} stops: {dead} died in the middle of the run",
            f"paceline: {dead} was ended by SIGKILL: the run is stopped",
        ]
    )
    assert "Traceback" not in done.err


def test_a_killed_launcher_takes_its_workers_with_it(start):
    run = training(start)
    run.process.send_signal(signal.SIGKILL)
    wait_for(lambda: not run.members())


def test_an_interrupted_launcher_ends_its_workers(start):
    run = training(start)
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    assert not run.members()


def test_a_stopped_worker_ends_the_run_at_the_deadline(start):
    run = training(start, "--deadline-s", "20")
    workers = run.workers()
    os.kill(workers[1], signal.SIGSTOP)
    done = run.finish()
    assert done.code == 1
    assert "paceline: worker 0 stops: another worker does not answer" in done.err
    assert not run.members()


def test_a_port_in_use_is_named(paceline):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = paceline("train", "lenet5", "--port", str(port), *LONG)
    assert done.code == 2
    assert done.err == (
        f"paceline: port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lenet6"], "lenet6"),
        (["nowhere:factory"], "nowhere"),
        (["lenet5", "--data", "libsvm:none.txt"], "none.txt"),
        (["lenet5", "--data", "images:none"], "none"),
        (
            ["lenet5", "--workers", "0"],
            "workers: Input should be greater than or equal to 1, not 0",
        ),
        (["lenet5", "--workers", "64", "--batch-size", "64"], "workers: 64 do not fit on"),
        (
            ["lenet5", "--batch-size", "1"],
            "batch_size: 1 samples cannot be shared by 2 workers",
        ),
        (["lenet5", "--batch-size", "1000"], "batch_size: 1000 makes 2 steps of 1438 samples"),
        (["lenet5", "--strategy", "magic"], "strategy: 'magic' is not known; choose one of"),
        (["lenet5", "--set", "bucket_mb=0"], "strategy allreduce: bucket_mb: Input should be"),
        (["lenet5", "--set", "bucket_mb"], "--set: 'bucket_mb' is not FIELD=VALUE"),
        (["lenet5", "--epochs", "many"], "--epochs"),
        (["lenet5", "--learning-rate", "-1"], "learning_rate: Input should be greater than 0"),
        (["torch.nn:ReLU"], "torch.nn:ReLU: the model has no trainable parameters"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_exit_code_2(paceline, arguments, message):
    done = paceline("train", *arguments, "--profile-s", "0.2")
    assert done.code == 2, done.err
    lines = [line for line in done.err.splitlines() if not line.startswith("lenet5: ")]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("paceline: ")
    assert message in lines[0]
    assert done.out == ""


def test_a_run_that_diverges_says_so(paceline):
    arguments = ("--learning-rate", "1e38", "--epochs", "1", "--profile-s", "0.2")
    done = paceline("train", "lenet5", *arguments)
    assert done.code == 2
    assert "paceline: learning_rate: with 1e+38 the training loss is nan" in done.err


def test_an_output_that_cannot_be_made_is_found_before_training(paceline, tmp_path):
    (tmp_path / "file").touch()
    done = paceline("train", "lenet5", "--output", "file/runs", *LONG)
    assert done.code == 2
    (line,) = done.err.splitlines()  # of rank 0, which alone makes the folder
    assert line.startswith("paceline: output: cannot make file/runs/")
    assert line.endswith(": Not a directory")


def test_a_model_that_exits_has_not_done_the_work(paceline, tmp_path):
    (tmp_path / "leaving.py").write_text(
        "import sys\nfrom torch import nn\n\n\nclass Net(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(8, 10)\n\n"
        "    def forward(self, x):\n        sys.exit(0)\n"
    )
    done = paceline("train", "leaving:Net", *LONG)
    assert done.code != 0
    assert "Traceback" not in done.err
    assert done.err.count("\n") == 1
