"""Elastic workers: stopped ones under torchrun, and runs of `paceline train --elastic`."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from faults import failpoints
from processes import Started, awaited, children_of
from quorums import lighthouse
from refusals import refused_field

pytest.importorskip("torchft")
pytestmark = pytest.mark.timeout(600)
PROGRAMS = Path(__file__).parent / "programs"
# Each worker is a replica group with its own torchrun, which provides the store.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]


def state_of(pid: int) -> str:
    """Return the state of a process, as in proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Cluster:
    """Named workers of a lighthouse, each with its own torchrun, in one folder."""

    def __init__(self, start: Callable[..., Started], folder: Path) -> None:
        self._start, self.folder = start, folder
        self.agents: dict[str, Started] = {}

    def start(self, name: str) -> None:
        self.agents[name] = self._start(*TORCHRUN, str(PROGRAMS / "elastic_worker.py"), name)

    def stopped(self, name: str) -> int:
        """Wait until a signal has stopped the worker; return its process id."""
        children = partial(children_of, self.agents[name].process.pid, "elastic_worker.py")
        pid: int = awaited(lambda: next((pid for pid in children() if state_of(pid) in "Tt"), None))
        return pid

    def steps(self, name: str) -> tuple[int, int]:
        """Return a worker's steps and the number of workers."""
        path = self.folder / f"{name}.steps"
        steps, workers = json.loads(awaited(lambda: path.exists() and path.read_text()))
        return steps, workers

    def await_steps(self, name: str, count: int) -> None:
        awaited(lambda: self.steps(name)[0] >= count)

    def await_workers(self, name: str, count: int) -> None:
        awaited(lambda: self.steps(name)[1] == count)

    def end(self, *names: str) -> list[str]:
        """Let all workers end; return digests of the named workers' states."""
        (self.folder / "end").touch()
        for name in names:
            done = self.agents[name].finish()
            assert done.code == 0, done.err[-5000:]
        return [(self.folder / f"{name}.bits").read_text() for name in names]


@pytest.fixture
def cluster(start: Callable[..., Started], tmp_path: Path, monkeypatch) -> Iterator[Cluster]:
    with lighthouse(join_timeout_ms=60_000) as address:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        yield Cluster(start, tmp_path)


@pytest.mark.parametrize("after", ["start", "headers", "mean"])
def test_a_stopped_worker_is_left_out_and_rejoins_with_the_others_bits(
    cluster: Cluster, after: str
) -> None:
    for name in ("a", "b"):
        cluster.start(name)
    with failpoints({"at": "local.exchange", "after": after, "visit": 4, "do": "SIGSTOP"}):
        cluster.start("c")
    stopped = cluster.stopped("c")
    for name in ("a", "b"):
        cluster.await_workers(name, 2)
    steps = cluster.steps("a")[0]
    os.kill(stopped, signal.SIGCONT)
    cluster.await_steps("c", steps)
    cluster.await_workers("a", 3)
    assert len(set(cluster.end("a", "b", "c"))) == 1


# `paceline train --elastic` restarts killed workers, and ends on errors and Ctrl-C.

RUN = (
    *("--strategy", "local", "--elastic"),
    *("--workers", "3", "--batch-size", "24", "--timeout", "10"),
    *("--strategy-option", "sync_every=5"),
)


@pytest.fixture
def training(start: Callable[..., Started], tmp_path: Path) -> Callable[..., Started]:
    """Start the training of a recipe, by default one with dropout."""
    shutil.copy(Path(__file__).parents[1] / "small_recipes.py", tmp_path)
    return lambda *options, recipe="small_recipes:with_dropout": start(
        "-m", "paceline", "train", recipe, *RUN, *options
    )


def worker_of(run: Started, number: int) -> int:
    """Wait until a worker runs; return its process id."""
    arguments = f" {number} http://"  # its number and the lighthouse
    found: list[int] = awaited(
        lambda: [pid for pid, line in run.members().items() if arguments in line]
    )
    return found[0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_worker_is_restarted_and_the_run_succeeds(training, tmp_path, number) -> None:
    run = training("--epochs", "120", "--json", "--checkpoint-every", "never")
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch 2/") for line in lines)
    os.kill(worker_of(run, number), signal.SIGKILL)
    done = run.finish()
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["epochs"][-1]["number"] == 119
    assert result["epochs"][-1]["test_loss"] < 0.2
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "model.safetensors").exists()


def test_ctrl_c_ends_all_workers(training) -> None:
    run = training("--epochs", "10000")
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch 2/") for line in lines)
    run.process.send_signal(signal.SIGINT)
    done = run.finish()
    assert done.code == 130, done.err
    assert "Traceback" not in done.err


RAISING = """
import itertools
import os
from dataclasses import replace

import small_recipes

steps = itertools.count()


class Raising(small_recipes.Network):
    def forward(self, left, right):
        if self.training and os.environ.get("RANK") == "1" and next(steps) == 30:
            raise RuntimeError("bang")
        return super().forward(left, right)


def raising():
    model = lambda: Raising(1, has_norm=True, dropout=0.2)
    return replace(small_recipes.with_dropout(), model=model)
"""


def test_an_error_of_a_worker_ends_the_run_without_a_restart(training, tmp_path) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    done = training("--epochs", "10000", recipe="raising:raising").finish()
    assert done.code == 1
    errors = [line for line in done.err.splitlines() if "bang" in line]
    assert ["worker 1 at raising.py" in line for line in errors] == [True]
    assert "restarting" not in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--strategy-option", "worker_ids=0,3"), "worker_ids"),
        (("--strategy-option", "sync_every=9999"), "sync_every"),
        (("--strategy-option", "lighthouse=nowhere"), "lighthouse"),
    ],
)
def test_wrong_options_are_refused(training, options, field) -> None:
    done = training("--epochs", "2", *options).finish()
    assert (done.code, refused_field(done.err)) == (2, field), done.err
