"""`make gpu-evidence`: parts run whole on a simulated GPU, and one that fails leaves the others."""

import json
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from processes import is_running

GPU = Path(__file__).parent
PROGRAMS = Path(__file__).parent / "programs"
DONE = "def run(part):\n    part.keep('a', {'b': 1}, 'one')\n"
FAILING = DONE + "    raise ValueError('no such thing')\n"
DYING = DONE + "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n"
# It keeps a figure, and goes on for ever with a process in a session of its own; neither ends by
# SIGTERM. It says then which processes these are.
HANGING = """
import os, pathlib, signal, subprocess, sys, time

def run(part):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part.keep("a", {"b": 1}, "one")
    command = [sys.executable, "-c", "import time; time.sleep(10_000)"]
    beside = subprocess.Popen(command, start_new_session=True)
    path = pathlib.Path(os.environ["PYTHONPATH"]) / "pids"
    path.with_name("place").write_text(os.getcwd())
    path.with_name("new").write_text(f"{os.getpid()} {beside.pid}")
    path.with_name("new").replace(path)
    time.sleep(10_000)
"""


@pytest.fixture(autouse=True)
def simulated(monkeypatch) -> None:
    """Commands have a simulated GPU."""
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "1")


def seconds_of(rows: dict[str, Any], *names: str) -> None:
    assert all(rows[name]["seconds"]["median"] > 0 for name in names)


def check_tests(figures: dict[str, Any]) -> None:
    assert {one["outcome"] for one in figures["tests"].values()} <= {"passed", "skipped"}
    assert len({name.partition("::")[0] for name in figures["tests"]}) > 3  # files


def check_sums(figures: dict[str, Any]) -> None:
    (rows,) = figures.values()
    seconds_of(rows, "host", "host, 16 layers", "gloo", "copies")


def check_hidden(figures: dict[str, Any]) -> None:
    assert {name.partition(",")[0] for name in figures} == {"lenet5", "gpt"}
    for found in figures.values():
        rows = found["variants"]
        seconds_of(rows, "lone", "apart", "together", found["best_ddp"], "host")
        exchange = rows["host"]["exchange"]
        assert exchange["num_steps"] == 4
        assert exchange["exposed_s"] >= 0
        assert exchange["hidden_s"] >= 0
        whole_s = exchange["hidden_s"] + exchange["exposed_s"]
        assert exchange["hidden_share"] == pytest.approx(exchange["hidden_s"] / whole_s)


def check_codecs(figures: dict[str, Any]) -> None:
    (rows,) = figures.values()
    calls = [name for name in rows if name.startswith("dynamic8")]
    assert len(calls) == 4
    seconds_of(rows, "copy_", *calls)
    assert all(rows[name]["of_copy"]["median"] > 0 for name in calls)


def check_hogbatch(figures: dict[str, Any]) -> None:
    assert list(figures) == ["GPU alone", "CPU+GPU", "adaptive"]
    for found in figures.values():
        (one,) = found["runs"]
        assert one["samples_per_s"] > 0
        assert sum(one["updates"].values()) > 0


def check_probe(figures: dict[str, Any]) -> None:
    (device,) = figures["machine"]["devices"]
    assert (device["name"], device["kind"]) == ("gpu0", "gpu")
    assert figures["machine"]["links"]


def check_profile(figures: dict[str, Any]) -> None:
    (found,) = figures.values()
    assert found["step"]["median_s"] > 0
    assert {"forward", "backward"} <= {row["phase"] for row in found["agreement"]}


def check_predicted(figures: dict[str, Any]) -> None:
    (found,) = figures.values()
    assert found["predicted_step_s"] > 0
    assert found["step_s"] > 0


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "tests": check_tests,
    "sums": check_sums,
    "hidden": check_hidden,
    "codecs": check_codecs,
    "probe": check_probe,
    "profile": check_profile,
    "predicted": check_predicted,
    "hogbatch": check_hogbatch,
}


@pytest.mark.parametrize("part", CHECKS)
def test_a_part_runs_whole_on_a_simulated_gpu(start, tmp_path, part: str):
    done = start(str(GPU / "main.py"), "out", part, "--smoke").finish()
    assert done.code == 0, done.out + done.err
    content = json.loads((tmp_path / "out" / f"{part}.json").read_text())
    assert (content["part"], content["outcome"], content["why"]) == (part, "done", None)
    assert content["simulated"]
    assert content["smoke"]
    assert content["versions"]["torch"] == content["machine"]["torch"]
    assert f"out {part} --smoke" in content["command"]
    assert content["date"].endswith("+00:00")
    CHECKS[part](content["figures"])
    summary = (tmp_path / "out" / "README.md").read_text()
    assert summary in done.out
    assert "The figures mean nothing" in summary
    for line in content["summary"].values():
        assert f"| {part} | done |" in summary
        assert line in summary


def test_ranks_on_two_gpus_are_measured_sharing_one_and_with_one_each(start, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "2")
    done = start(str(GPU / "main.py"), "out", "sums", "--smoke").finish()
    assert done.code == 0, done.out + done.err
    figures = json.loads((tmp_path / "out" / "sums.json").read_text())["figures"]
    assert [name.partition("float32, ")[2] for name in figures] == [
        "2 ranks on one GPU",
        "2 ranks, a GPU each",
    ]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_run_as_they_are_timed(start):
    """Simulated GPUs have no Triton."""
    done = start(str(PROGRAMS / "evidence_kernels.py"), afresh=True).finish()
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    for name in ("dynamic8", "static8", "mantissa8", "linear8"):
        assert found[f"{name}, encode"] == found[f"{name}, decode"] == 5 * 5000 + 4 * 5
        assert found[f"{name}, decode and add"] == 9 * 5000 + 4 * 5
    assert len(found) == 12


def parts(tmp_path: Path, **modules: str) -> None:
    (tmp_path / "evidence").mkdir()
    for name, text in modules.items():
        (tmp_path / "evidence" / f"{name}.py").write_text(text)


def contents(tmp_path: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}


PROGRAM = str(PROGRAMS / "evidence_parts.py")


def test_a_part_that_fails_leaves_the_others(start, tmp_path):
    parts(tmp_path, failing=FAILING, dying=DYING, fine=DONE, unwritten="import nothing_of_it")
    names = ("unwritten", "failing", "dying", "fine")
    done = start(PROGRAM, "600", "out", *names).finish()
    assert done.code == 1, done.out + done.err
    found = contents(tmp_path)
    assert {name: one["outcome"] for name, one in found.items()} == {
        **dict.fromkeys(names, "failed"),
        "fine": "done",
    }
    # What was kept before stays, and the file says why there is no more.
    assert all(found[name]["figures"] == {"a": {"b": 1}} for name in names[1:])
    assert found["failing"]["why"] == "ValueError: no such thing"
    assert "ValueError: no such thing" in found["failing"]["stderr"]
    assert found["unwritten"]["why"] == "ModuleNotFoundError: No module named 'nothing_of_it'"
    assert found["dying"]["why"] == "its process was ended by SIGKILL"
    assert found["fine"]["why"] is None
    summary = (tmp_path / "out" / "README.md").read_text()
    assert "| failing | failed |" in summary
    assert "a: one<br>ValueError: no such thing |" in summary
    assert "| fine | done |" in summary


def test_a_part_that_hangs_is_ended_at_its_deadline_and_leaves_no_process(start, tmp_path):
    parts(tmp_path, hanging=HANGING)
    deadline_s = 4
    while not (tmp_path / "pids").exists():  # on a busy machine it may not have come so far
        done = start(PROGRAM, str(deadline_s), "out", "hanging").finish()
        assert done.code == 1, done.out + done.err
        found = contents(tmp_path)["hanging"]
        assert found["outcome"] == "ended at its deadline"
        assert found["seconds"] >= deadline_s
        deadline_s *= 2
    assert found["figures"] == {"a": {"b": 1}}
    check_nothing_is_left(tmp_path)


def check_nothing_is_left(tmp_path: Path) -> None:
    assert not any(is_running(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    place = Path((tmp_path / "place").read_text())
    assert place.name.startswith("tmp")
    assert not place.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_part_is_ended_with_the_command_and_what_it_has_kept_is_shown(start, tmp_path, number):
    parts(tmp_path, hanging=HANGING)
    command = start(PROGRAM, "600", "out", "hanging")
    while not (tmp_path / "pids").exists():
        assert command.process.poll() is None
        time.sleep(0.02)
    command.process.send_signal(number)
    done = command.finish()
    assert done.code not in (0, 1)
    check_nothing_is_left(tmp_path)
    assert "| hanging | unfinished | - | a: one |" in (tmp_path / "out" / "README.md").read_text()


# The program, which gets SIGTERM while it starts the part: that runs, and is not known yet.
SLOW_TO_START = f"""
import os, pathlib, runpy, signal, sys, time
sys.path[:0] = [{str(GPU)!r}, {str(GPU.parent)!r}]
import supervise

def slow(*arguments, **how):
    process = start(*arguments, **how)
    while not pathlib.Path("pids").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

start, supervise.start = supervise.start, slow
sys.argv[:] = [{PROGRAM!r}, "600", "out", "hanging"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_part_is_ended_though_the_command_is_before_it_knows_it(start, tmp_path):
    """On a busy machine the part was quicker; what it had started went on for ever."""
    parts(tmp_path, hanging=HANGING)
    done = start("-c", SLOW_TO_START).finish()
    assert done.code not in (0, 1)
    check_nothing_is_left(tmp_path)


def test_what_cannot_be_measured_is_refused(start, tmp_path, monkeypatch):
    done = start(str(GPU / "main.py"), "out", "codecs").finish()
    assert (done.code, done.out) == (2, "")
    assert done.err == "gpu-evidence: simulated GPUs have no speed to measure; take --smoke\n"
    done = start(str(GPU / "main.py"), "out", "codec", "--smoke").finish()
    assert done.code == 2
    assert "no part is called 'codec'; known: tests, sums, hidden, beside, codecs" in done.err
    monkeypatch.delenv("PACELINE_SIMULATED_GPUS")
    done = start(str(GPU / "main.py"), "out").finish()
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("gpu-evidence: there is no GPU here; ")
    assert not (tmp_path / "out").exists()


def test_all_parts_together_take_less_than_ten_minutes(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    from main import DEADLINES_S

    assert sum(DEADLINES_S.values()) <= 600
    assert sorted(DEADLINES_S) == sorted(
        path.stem for path in (GPU / "evidence").glob("*.py") if "def run(" in path.read_text()
    )
