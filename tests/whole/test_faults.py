"""Workers that die, and whatever else goes wrong in a run: one clear line, and nothing left."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from processes import Started

pytestmark = pytest.mark.slow

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


FAILING = """
import itertools
import os
from pathlib import Path

from torch import nn

calls = itertools.count()


class Bang(nn.Linear):
    def __init__(self, fails):
        super().__init__(64, 10)
        self.fails = fails

    def forward(self, images):
        if self.fails():
            raise RuntimeError("bang")
        return super().forward(images.flatten(1))


def at_once():
    return Bang(lambda: True)


def in_its_profile():
    return Bang(lambda: next(calls) > 20)


def at_a_sign():
    return Bang(lambda: os.environ["RANK"] == "1" and Path("sign").exists())
"""
BANG = FAILING.splitlines().index('            raise RuntimeError("bang")') + 1
IN_STEP = ("allreduce", "host")


def said_once(err: str) -> str:
    """The one line in which the run says why it ends."""
    assert "Traceback" not in err
    (line,) = (line for line in err.splitlines() if line.startswith("paceline: "))
    return line.removeprefix("paceline: ")


@pytest.mark.parametrize("strategy", IN_STEP)
def test_a_model_that_cannot_run_is_refused_with_its_line(paceline, tmp_path, strategy):
    (tmp_path / "failing.py").write_text(FAILING)
    done = paceline("train", "failing:at_once", "--strategy", strategy, *LONG)
    assert done.code == 2, done.err
    asked = "model failing:at_once: fails on a sample of its train data, float32 1x1x8x8"
    assert said_once(done.err) == f"{asked}: RuntimeError: bang (at failing.py:{BANG})"
    assert done.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        *(("train", ("--strategy", strategy, *LONG)) for strategy in IN_STEP),
        ("profile", ("--data", "digits")),
    ],
)
def test_a_model_that_fails_before_any_result_leaves_no_folder(paceline, tmp_path, verb, options):
    (tmp_path / "failing.py").write_text(FAILING)
    done = paceline(verb, "failing:in_its_profile", *options)
    assert done.code == 1, done.err
    said = rf"RuntimeError: bang \(worker [01] at failing\.py:{BANG}\)"
    assert re.fullmatch(said, said_once(done.err))
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("strategy", IN_STEP)
def test_a_model_that_fails_on_one_rank_in_training_is_blamed_there(start, tmp_path, strategy):
    (tmp_path / "failing.py").write_text(FAILING)
    run = start("-m", "paceline", "train", "failing:at_a_sign", "--strategy", strategy, *LONG)
    assert any(line.startswith("epoch 1/") for line in iter(run.process.stderr.readline, ""))
    (tmp_path / "sign").touch()
    done = run.finish()
    assert done.code == 1, done.err
    assert said_once(done.err) == f"RuntimeError: bang (worker 1 at failing.py:{BANG})"
    assert not run.members()
    assert list((tmp_path / "runs").iterdir()) == []


# As where a disk is full: no file may have more bytes than the first argument says.
LIMITED = """
import resource, sys
from paceline.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv[1:] = sys.argv[2:]
main()
"""
FEW = ("--workers", "1", "--profile-s", "0.2", "--epochs", "2")


def limited(start, tmp_path, nbytes: int, *more: str):
    """Train LeNet-5, whose parameters take 247 kB, in processes that inherit the limit."""
    (tmp_path / "limited.py").write_text(LIMITED)
    return start("limited.py", str(nbytes), "train", "lenet5", *FEW, *more, afresh=True).finish()


def test_results_without_room_are_named_and_made_after_it_is_there(start, paceline, tmp_path):
    """A report takes more than a megabyte, and a checkpoint's files less."""
    done = limited(start, tmp_path, 1 << 20, "--checkpoint-every", "40")
    assert done.code == 2, done.err
    (folder,) = (tmp_path / "runs").iterdir()
    path = folder.relative_to(tmp_path)
    assert said_once(done.err) == (
        f"output: the results cannot be written to {path}: OSError: [Errno 27] File too large; "
        f"make room; then paceline train --resume {path} goes on"
    )
    assert not (folder / "report.html").exists()
    again = paceline("train", "--resume", str(path))
    assert again.code == 0, again.err
    assert (folder / "report.html").stat().st_size > 1 << 20


def test_a_run_that_can_write_nothing_leaves_nothing(start, tmp_path):
    done = limited(start, tmp_path, 1 << 17, "--checkpoint-every", "never")
    assert done.code == 2, done.err
    said = r"output: the results cannot be written to runs/\S+: .*File too large.*; make room"
    assert re.fullmatch(said, said_once(done.err))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_full_disk_is_named(start, tmp_path):
    """On a small file system that only this run sees."""
    (tmp_path / "runs").mkdir()
    mounted = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=200k none runs && "$@"']
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mounted, "sh", "true"], cwd=tmp_path, capture_output=True).returncode
    ):
        pytest.skip("this user may not mount a file system")
    command = [sys.executable, "-m", "paceline", "train", "lenet5", *FEW]
    run = Started([*mounted, "sh", *command], tmp_path, afresh=True)
    done = run.finish()
    assert done.code == 2, done.err
    said = r"output: the results cannot be written to runs/\S+: .*No space left.*; make room"
    assert re.fullmatch(said, said_once(done.err))
    assert not run.members()
