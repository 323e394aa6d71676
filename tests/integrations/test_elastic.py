"""Elastic workers under torchrun, with workers that are killed, stopped or new."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults import failpoints
from processes import DEADLINE_S, awaited, children_of, has_ended, is_running

pytest.importorskip("torchft")
pytestmark = pytest.mark.timeout(600)
PROGRAMS = Path(__file__).parent / "programs" / "elastic"
# Each worker is a replica group with its own torchrun, which provides the store.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]


def state_of(pid: int) -> str:
    """Return the state of a process, as in proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Cluster:
    """A lighthouse, and named workers with their own torchruns, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.lighthouse = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "lighthouse.py")],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RUST_LOG": "error"},
        )
        assert self.lighthouse.stdout is not None
        self.address = self.lighthouse.stdout.readline().strip()

    def start(self, name: str) -> None:
        own = {"TORCHFT_LIGHTHOUSE": self.address, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        command = [sys.executable, *TORCHRUN, str(PROGRAMS / "worker.py"), name]
        (self.folder / f"{name}.steps").unlink(missing_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | own, stdout=log, stderr=log
            )

    def stopped(self, name: str) -> int:
        """Wait until a signal has stopped the worker; return its process id."""

        def found() -> int | None:
            for pid in children_of(self.agents[name].pid, "worker.py"):
                if state_of(pid) in "Tt":
                    return pid
            return None

        pid: int = awaited(found)
        return pid

    def steps(self, name: str) -> tuple[int, int, int]:
        """Return a worker's steps, its optimizer's steps at the start, and the worker count."""

        def found() -> Any:
            path = self.folder / f"{name}.steps"
            return json.loads(path.read_text()) if path.exists() else None

        steps, begun, workers = awaited(found)
        return steps, begun, workers

    def await_steps(self, name: str, count: int) -> None:
        awaited(lambda: self.steps(name)[0] >= count)

    def await_workers(self, name: str, count: int) -> None:
        awaited(lambda: self.steps(name)[2] == count)

    def end(self, *names: str) -> list[dict[str, Any]]:
        """Let all workers end; return the results of the named workers."""
        (self.folder / "end").touch()
        for name in names:
            code = self.agents[name].wait(DEADLINE_S / 4)
            assert code == 0, (self.folder / f"{name}.log").read_text()[-5000:]
        return [json.loads((self.folder / f"{name}.json").read_text()) for name in names]

    def close(self) -> None:
        pids = [pid for one in self.agents.values() for pid in children_of(one.pid, "worker.py")]
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        for pid in pids:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.lighthouse.kill()
        self.lighthouse.wait()
        assert self.lighthouse.stdout is not None
        self.lighthouse.stdout.close()
        assert all(has_ended(pid, 60) for pid in pids)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def equal(found: list[dict[str, Any]]) -> bool:
    return len({one["bits"] for one in found}) == 1


def fault(do: str, after: str) -> dict[str, Any]:
    return {"at": "local.exchange", "after": after, "visit": 4, "do": do}


@pytest.mark.parametrize("after", ["start", "mean"])
def test_the_others_continue_without_a_killed_worker_and_a_new_one_joins(
    cluster: Cluster, after: str
) -> None:
    for name in ("a", "b"):
        cluster.start(name)
    with failpoints(fault("SIGKILL", after)):
        cluster.start("c")
    assert cluster.agents["c"].wait(DEADLINE_S / 4) != 0
    for name in ("a", "b"):
        cluster.await_workers(name, 2)
    cluster.start("d")
    steps, begun, workers = cluster.steps("d")
    assert (workers, steps) == (3, begun)  # the optimizer's state comes from a peer
    assert steps > 0
    cluster.await_steps("d", steps + 10)
    assert equal(cluster.end("a", "b", "d"))


@pytest.mark.parametrize("after", ["start", "headers", "mean"])
def test_a_stopped_worker_is_left_out_and_rejoins_with_the_others_bits(
    cluster: Cluster, after: str
) -> None:
    for name in ("a", "b"):
        cluster.start(name)
    with failpoints(fault("SIGSTOP", after)):
        cluster.start("c")
    stopped = cluster.stopped("c")
    for name in ("a", "b"):
        cluster.await_workers(name, 2)
    steps = cluster.steps("a")[0]
    os.kill(stopped, signal.SIGCONT)
    cluster.await_steps("c", steps)
    cluster.await_workers("a", 3)
    assert equal(cluster.end("a", "b", "c"))
