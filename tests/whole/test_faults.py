"""Workers that die, and whatever else goes wrong in a run: it ends, says so, and leaves nothing."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import failpoints
from processes import Started, children_of, has_ended
from refusals import refused_field

LONG = ("--profile-s", "0.2", "--epochs", "1000")
TRAIN = ("-m", "paceline", "train", "lenet5", *LONG)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
IN_STEP = ("allreduce", "host")
slow = pytest.mark.slow
Start = Callable[..., Started]


def said(err: str) -> list[str]:
    """What the processes of a run have said about its end."""
    assert "SIGABRT" not in err
    return sorted(line for line in err.splitlines() if line.startswith("paceline: "))


def at_step(worker: int, action: str) -> dict[str, object]:
    return {"at": "step.done", "worker": worker, "step": 30, "do": action}


@pytest.mark.parametrize("victim", [pytest.param(0, marks=slow), 1])
def test_a_killed_worker_ends_the_run_before_any_deadline(start: Start, victim: int) -> None:
    with failpoints(at_step(victim, "SIGKILL")):
        run = start(*TRAIN, "--deadline-s", "1000")
    workers = run.workers()
    done = run.finish()
    assert done.code == 1
    other, launcher = sorted(said(done.err), key=lambda line: "SIGKILL" in line)
    assert f"worker {1 - victim} " in other
    dead = re.search(rf"worker {victim} \(process (\d+)\)", launcher)[0]
    assert dead in other
    assert "Traceback" not in done.err
    assert not [pid for pid in workers if not has_ended(pid)]


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_ends_takes_its_workers_with_it(start: Start, number: int) -> None:
    run = start(*TRAIN)
    assert any(line.startswith("epoch 1/") for line in iter(run.process.stderr.readline, ""))
    workers = run.workers()
    run.process.send_signal(number)
    assert len(workers) == 2
    assert all(map(has_ended, workers))
    run.process.wait()
    assert not run.members()


@slow
def test_a_stopped_worker_ends_the_run_at_the_deadline(start: Start) -> None:
    with failpoints(at_step(1, "SIGSTOP")):
        done = start(*TRAIN, "--deadline-s", "5").finish()
    assert done.code == 1
    assert any("worker 0 " in line for line in said(done.err))


@slow
def test_under_torchrun_every_other_rank_says_which_one_died(start: Start) -> None:
    # gloo does not always notice at once that a peer is gone, and torchrun kills 30 s after
    # SIGTERM: the deadline, after which a rank notices for sure, is shorter.
    with failpoints(at_step(0, "SIGKILL")):
        run = start(*TORCHRUN, "3", *TRAIN, "--deadline-s", "15")
    assert any(line.startswith("epoch 1/") for line in iter(run.process.stderr.readline, ""))
    ranks = children_of(run.process.pid, "paceline")
    done = run.finish()
    assert done.code != 0
    assert all(map(has_ended, ranks))
    lines = said(done.err)
    assert [line.split()[2] for line in lines] == ["1", "2"]
    assert len({re.search(r"worker 0 \(process \d+\)", line)[0] for line in lines}) == 1
    # The only traceback is torchrun's own, and no survivor is aborted.
    assert done.err.count("Traceback (most recent call last)") == 1


SLOW_TO_REPORT = """
import signal, sys
from paceline.core.errors import InvalidInput
from paceline.runs.launching import as_rank, leave

class SlowStream:
    def write(self, text):
        signal.sigtimedwait([], 1.0)
        sys.__stderr__.write(text)

    def flush(self):
        sys.__stderr__.flush()

def fail(group):
    raise InvalidInput("field", "the same on all ranks")

sys.stderr = SlowStream()
leave(as_rank(fail, 60.0, debug=False))
"""


@slow
def test_no_rank_ends_before_the_first_to_fail_has_said_why(start: Start, tmp_path: Path) -> None:
    """torchrun kills the others at the first rank's end, and with them what they have to say."""
    (tmp_path / "slow_to_report.py").write_text(SLOW_TO_REPORT)
    done = start(*TORCHRUN, "2", "slow_to_report.py").finish()
    assert done.code != 0
    assert refused_field(done.err) == "field"


def test_a_wrong_option_is_one_line_with_exit_code_2(paceline) -> None:
    done = paceline("train", "lenet5", "--batch-size", "1")  # which two workers find
    assert (done.code, refused_field(done.err), done.out) == (2, "batch_size", "")


FAILING = """
import itertools
import os
import sys
from torch import nn

calls = itertools.count()


class Bang(nn.Linear):
    def __init__(self, fails):
        super().__init__(64, 10)
        self.fails = fails

    def forward(self, images):
        if self.fails(self):
            raise RuntimeError("bang")
        return super().forward(images.flatten(1))


def at_once():
    return Bang(lambda model: True)


def leaving():
    return Bang(lambda model: sys.exit(0))


def in_its_profile():
    return Bang(lambda model: next(calls) > 20)


def in_training():
    # The profile leaves the parameters as they were.
    def fails(model):
        size = float(model.weight.detach().square().sum())
        model.first = getattr(model, "first", size)
        return os.environ["RANK"] == "1" and abs(size - model.first) > 1e-3
    return Bang(fails)
"""
BANG = FAILING.splitlines().index('            raise RuntimeError("bang")') + 1
PLACE = f"failing.py:{BANG}"


@pytest.mark.parametrize(
    ("verb", "name", "code", "named"),
    [
        ("train", "at_once", 2, f"RuntimeError: bang (at {PLACE})"),
        pytest.param("train", "leaving", 1, "sys.exit(0)", marks=slow),
        *(
            pytest.param(verb, "in_its_profile", 1, PLACE, marks=slow)
            for verb in ("train", "profile")
        ),
    ],
)
def test_a_model_that_fails_is_named_with_its_line_and_leaves_no_folder(
    paceline, tmp_path: Path, verb: str, name: str, code: int, named: str
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    options = LONG if verb == "train" else ("--data", "digits")
    done = paceline(verb, f"failing:{name}", *options)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    (line,) = said(done.err)
    assert named in line
    assert not list(tmp_path.glob("runs/*"))


@slow
@pytest.mark.parametrize("strategy", IN_STEP)
def test_a_model_that_fails_on_one_rank_in_training_is_blamed_there(paceline, tmp_path, strategy):
    (tmp_path / "failing.py").write_text(FAILING)
    done = paceline("train", "failing:in_training", "--strategy", strategy, *LONG)
    assert done.code == 1, done.err
    (line,) = said(done.err)
    assert f"worker 1 at {PLACE}" in line
    assert not list((tmp_path / "runs").iterdir())


# As where a disk is full: no file may have more bytes than the first argument says.
LIMITED = """
import resource, sys
from paceline.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv[1:] = sys.argv[2:]
main()
"""


@slow
@pytest.mark.parametrize(("nbytes", "every"), [(1 << 20, "40"), (1 << 17, "never")])
def test_results_without_room_are_named_and_made_after_it_is_there(
    start: Start, paceline, tmp_path: Path, nbytes: int, every: str
) -> None:
    """A report takes more than a megabyte, and a checkpoint's files less, but more than 128 kB."""
    (tmp_path / "limited.py").write_text(LIMITED)
    few = ("--workers", "1", "--profile-s", "0.2", "--epochs", "2", "--checkpoint-every", every)
    done = start("limited.py", str(nbytes), "train", "lenet5", *few, afresh=True).finish()
    assert (done.code, refused_field(done.err)) == (2, "output")
    folders = list((tmp_path / "runs").iterdir())
    if every == "never":
        assert not folders
        return
    (folder,) = folders
    assert f"--resume runs/{folder.name}" in done.err
    assert not (folder / "report.html").exists()
    again = paceline("train", "--resume", f"runs/{folder.name}")
    assert again.code == 0, again.err
    assert (folder / "report.html").stat().st_size > 1 << 20
    assert json.loads((folder / "result.json").read_text())["epochs"]
