import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from paceline.core.errors import InvalidInput, WorkerLost, WorkersFailed
from paceline.links import launch as module
from paceline.links.launch import launch
from processes import is_running

NOTE = """
import json, os, pathlib, sys
rank = os.environ["RANK"]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "PACELINE_LAUNCHER")
note = {name: os.environ[name] for name in names}
note |= {"pid": os.getpid(), "stdin": sys.stdin.read()}
pathlib.Path(sys.argv[1], rank).write_text(json.dumps(note))
"""


def start(code: str, folder: Path, num_workers: int = 2, port: int = 0) -> None:
    launch([sys.executable, "-c", code, str(folder)], num_workers, port)


def notes(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.3)
    monkeypatch.setattr(module, "TERMINATION_S", 0.3)


def test_workers_find_the_environment_of_torchrun(tmp_path):
    start(NOTE, tmp_path, 3)
    found = notes(tmp_path)
    assert [note["RANK"] for note in found] == ["0", "1", "2"]
    assert [note["LOCAL_RANK"] for note in found] == ["0", "1", "2"]
    assert {(note["WORLD_SIZE"], note["LOCAL_WORLD_SIZE"]) for note in found} == {("3", "3")}
    assert {note["MASTER_ADDR"] for note in found} == {"127.0.0.1"}
    assert len({note["MASTER_PORT"] for note in found}) == 1
    assert {note["PACELINE_LAUNCHER"] for note in found} == {str(os.getpid())}
    assert {note["stdin"] for note in found} == {""}  # nobody waits for a terminal
    assert "RANK" not in os.environ


FAULTS = """
import pathlib, resource, sys
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(2**26)  # as long as a step's activations may be
before = faults()
for _ in range(4):
    bytearray(2**26)
pathlib.Path(sys.argv[1], "0").write_text(str(faults() - before))
"""
PAGES = 2**26 // 4096


def test_workers_keep_freed_memory_unless_the_user_has_it_otherwise(tmp_path, monkeypatch):
    start(FAULTS, tmp_path, 1)
    assert notes(tmp_path)[0] < PAGES
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    start(FAULTS, tmp_path, 1)
    assert notes(tmp_path)[0] > 3 * PAGES


def test_workers_meet_at_the_given_port(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start(NOTE, tmp_path, 1, port)
    assert notes(tmp_path)[0]["MASTER_PORT"] == str(port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(tmp_path, port):
    with pytest.raises(InvalidInput, match=f"port: cannot listen on 127.0.0.1:{port}: "):
        start(NOTE, tmp_path, 1, port)


def test_a_port_in_use_is_refused_and_nothing_started(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidInput, match="Address already in use"):
            start(NOTE, tmp_path, 1, taken.getsockname()[1])
    assert notes(tmp_path) == []


def test_the_largest_exit_code_is_reported(tmp_path):
    code = "import os, sys; sys.exit({'0': 1, '1': 2, '2': 0}[os.environ['RANK']])"
    with pytest.raises(WorkersFailed) as error:
        start(code, tmp_path, 3)
    assert error.value.exit_code == 2


KILLED = (
    NOTE
    + """
import signal, time
while not all(pathlib.Path(sys.argv[1], other).exists() for other in "01"):
    time.sleep(0.01)
if rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
)
STUBBORN = (
    NOTE
    + """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], rank).touch()
while not all(pathlib.Path(sys.argv[1], other).exists() for other in "01"):
    time.sleep(0.01)
if rank == "1":
    sys.exit(3)
time.sleep(8)
pathlib.Path(sys.argv[1], "outlived").touch()
"""
)


def test_a_killed_worker_is_named_and_the_others_are_ended(tmp_path):
    with pytest.raises(WorkerLost) as error:
        start(KILLED, tmp_path)
    first, second = (note["pid"] for note in notes(tmp_path))
    assert str(error.value) == (
        f"worker 1 (process {second}) was ended by SIGKILL: the run is stopped"
    )
    assert not is_running(first)


def test_a_worker_that_does_not_listen_is_ended_nevertheless(tmp_path):
    with pytest.raises(WorkersFailed) as error:
        start(STUBBORN, tmp_path)
    assert error.value.exit_code == 3
    assert not (tmp_path / "outlived").exists()
    assert not any(is_running(note["pid"]) for note in notes(tmp_path))


def test_workers_end_when_one_cannot_be_started(tmp_path, monkeypatch):
    started = []

    def second_fails(command, environment, start_one=module.start):
        if started:
            raise OSError("no more processes")
        started.append(start_one(command, environment=environment))
        return started[0]

    monkeypatch.setattr(module, "start", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        start("import time; time.sleep(60)", tmp_path)
    assert started[0].poll() == -signal.SIGTERM


def test_the_programs_own_reaction_to_sigterm_comes_back(tmp_path):
    def reaction(number: int, frame: object) -> None: ...

    previous = signal.signal(signal.SIGTERM, reaction)
    try:
        start("", tmp_path)
        with pytest.raises(WorkersFailed):
            start("raise SystemExit(1)", tmp_path)
        assert signal.getsignal(signal.SIGTERM) is reaction
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_thread_may_start_workers(tmp_path):
    errors = []

    def run() -> None:
        try:
            start(NOTE, tmp_path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert errors == []
    assert len(notes(tmp_path)) == 2


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_is_left_open(tmp_path):
    start("", tmp_path)
    before = num_descriptors()
    for _ in range(3):
        start("", tmp_path)
    assert num_descriptors() == before
