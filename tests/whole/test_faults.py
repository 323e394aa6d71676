"""Failed runs end, report the cause in one line, and leave no processes or files behind."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import failpoints
from processes import Started, children_of, has_ended
from refusals import refused_field

LONG = ("--profile-s", "0.2", "--epochs", "1000")
TRAIN = ("-m", "paceline", "train", "lenet5", *LONG)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
slow = pytest.mark.slow
Start = Callable[..., Started]


def error_lines(err: str) -> list[str]:
    """Return the error lines of a run's processes, sorted."""
    assert "SIGABRT" not in err
    return sorted(line for line in err.splitlines() if line.startswith("paceline: "))


def killed_at_step(worker: int) -> dict[str, object]:
    return {"at": "step.done", "worker": worker, "step": 30, "do": "SIGKILL"}


@pytest.mark.parametrize("victim", [pytest.param(0, marks=slow), 1])
def test_a_killed_worker_ends_the_run_before_any_deadline(start: Start, victim: int) -> None:
    with failpoints(killed_at_step(victim)):
        run = start(*TRAIN, "--timeout", "1000")
    workers = run.workers()
    done = run.finish()
    assert done.code == 1
    other, launcher = sorted(error_lines(done.err), key=lambda line: "SIGKILL" in line)
    assert f"worker {1 - victim} " in other
    dead = re.search(rf"worker {victim} \(process (\d+)\)", launcher)[0]
    assert dead in other
    assert "Traceback" not in done.err
    assert not [pid for pid in workers if not has_ended(pid)]


@slow
def test_under_torchrun_every_other_rank_names_the_killed_one(start: Start) -> None:
    # gloo may take long to notice a lost peer, and torchrun kills the ranks 30 s after SIGTERM.
    # With a shorter timeout each rank notices in time.
    with failpoints(killed_at_step(0)):
        run = start(*TORCHRUN, "3", *TRAIN, "--timeout", "15")
    assert any(line.startswith("epoch 1/") for line in iter(run.process.stderr.readline, ""))
    ranks = children_of(run.process.pid, "paceline")
    done = run.finish()
    assert done.code != 0
    assert all(map(has_ended, ranks))
    lines = error_lines(done.err)
    assert [line.split()[2] for line in lines] == ["1", "2"]
    assert len({re.search(r"worker 0 \(process \d+\)", line)[0] for line in lines}) == 1
    # Only torchrun prints a traceback, and no surviving rank is aborted.
    assert done.err.count("Traceback (most recent call last)") == 1


SLOW_TO_REPORT = """
import signal, sys
from paceline.core.errors import InvalidInput
from paceline.runs.rank import as_rank, leave

class SlowStream:
    def write(self, text):
        signal.sigtimedwait([], 1.0)
        sys.__stderr__.write(text)

    def flush(self):
        sys.__stderr__.flush()

def fail(group):
    raise InvalidInput("field", "is invalid on all ranks")

sys.stderr = SlowStream()
leave(as_rank(fail, 60.0))
"""


@slow
def test_no_rank_exits_before_the_error_is_printed(start: Start, tmp_path: Path) -> None:
    """When the first rank exits, torchrun kills the others, which may not have printed yet."""
    (tmp_path / "slow_to_report.py").write_text(SLOW_TO_REPORT)
    done = start(*TORCHRUN, "2", "slow_to_report.py").finish()
    assert done.code != 0
    assert refused_field(done.err) == "field"


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
    # The profile does not change the parameters; training does.
    def fails(model):
        size = float(model.weight.detach().square().sum())
        model.first = getattr(model, "first", size)
        return os.environ["RANK"] == "1" and abs(size - model.first) > 1e-3
    return Bang(fails)


def in_a_body():
    # The hub uses the model, too.
    body = Bang(lambda model: "worker" in sys.argv[0] and next(calls) > 50)
    return nn.Sequential(body, nn.ReLU(), nn.Linear(10, 200), nn.ReLU(), nn.Linear(200, 10))
"""
BANG = FAILING.splitlines().index('            raise RuntimeError("bang")') + 1
PLACE = f"failing.py:{BANG}"


ELASTIC = "train --strategy local --elastic --timeout 10"
IN_STEPS = [
    ("train", "leaving", 1, "sys.exit(0)"),
    ("train", "in_its_profile", 1, PLACE),
    ("profile", "in_its_profile", 1, PLACE),
    ("train", "in_training", 1, f"worker 1 at {PLACE}"),
    ("train --strategy local", "in_training", 1, f"worker 1 at {PLACE}"),
    ("train --strategy wheel", "in_a_body", 1, f"worker 0,1 at {PLACE}"),
    # A worker is restarted only after a signal.
    (f"{ELASTIC} --strategy-option sync_every=5", "in_training", 1, f"worker 1 at {PLACE}"),
]


@pytest.mark.parametrize(
    ("verb", "name", "code", "named"),
    [
        ("train", "at_once", 2, f"RuntimeError: bang (at {PLACE})"),
        *(pytest.param(*one, marks=slow) for one in IN_STEPS),
    ],
)
def test_an_error_in_a_model_is_reported_with_its_line_and_leaves_no_folder(
    paceline, tmp_path: Path, verb: str, name: str, code: int, named: str
) -> None:
    if "--elastic" in verb:
        pytest.importorskip("torchft")
    (tmp_path / "failing.py").write_text(FAILING)
    options = ("--data", "digits") if verb == "profile" else LONG
    done = paceline(*verb.split(), f"failing:{name}", *options)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    (line,) = error_lines(done.err)
    assert named in line
    # An elastic worker that another one's error ends saves its state.
    assert "--elastic" in verb or not list(tmp_path.glob("runs/*"))
