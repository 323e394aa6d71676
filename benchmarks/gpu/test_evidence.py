"""`make gpu-evidence`: parts run whole on a simulated GPU, and one that fails leaves the others."""

import json
import select
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import pytest

from faults import told
from processes import has_ended

GPU = Path(__file__).parent
PROGRAMS = Path(__file__).parent / "programs"
DONE = "def run(part):\n    part.keep('a', {'b': 1}, 'one')\n"
FAILING = DONE + "    raise ValueError('no such thing')\n"
DYING = DONE + "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n"
# It keeps a figure, and goes on for ever with a process in a session of its own; neither ends by
# SIGTERM. It tells then which processes these are, and its folder.
HANGING = """
import os, pathlib, signal, subprocess, sys

def run(part):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part.keep("a", {"b": 1}, "one")
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    beside = subprocess.Popen(command, start_new_session=True)
    folder = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    with (folder / "hanging").open("w") as told:
        told.write(f"{os.getpid()} {beside.pid} {os.getcwd()}\\n")
    signal.pause()
"""


@pytest.fixture(autouse=True)
def simulated(monkeypatch) -> None:
    """Commands have a simulated GPU."""
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "1")


def seconds_of(rows: dict[str, Any], *names: str) -> None:
    assert all(rows[name]["seconds"]["median"] > 0 for name in names)


def check_hidden(figures: dict[str, Any]) -> None:
    assert {name.partition(",")[0] for name in figures} == {"lenet5", "gpt"}
    for found in figures.values():
        rows = found["variants"]
        seconds_of(rows, "lone", "apart", "together", found["best_ddp"], "host")
        exchange = rows["host"]["exchange"]
        assert exchange["num_steps"] == 4
        assert min(exchange["exposed_s"], exchange["hidden_s"]) >= 0
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
        assert min(one["samples_per_s"], sum(one["updates"].values())) > 0


def check_tests(figures: dict[str, Any]) -> None:
    assert {one["outcome"] for one in figures["tests"].values()} <= {"passed", "skipped"}
    assert len({name.partition("::")[0] for name in figures["tests"]}) == 3  # files


def check_sums(figures: dict[str, Any]) -> None:
    seconds_of(only(figures), "host", "host, 16 layers", "gloo", "copies")


def check_probe(figures: dict[str, Any]) -> None:
    (device,) = figures["machine"]["devices"]
    assert (device["name"], device["kind"]) == ("gpu0", "gpu")
    assert figures["machine"]["links"]


def check_profile(figures: dict[str, Any]) -> None:
    found = only(figures)
    assert found["step"]["median_s"] > 0
    assert {"forward", "backward"} <= {row["phase"] for row in found["agreement"]}


def check_predicted(figures: dict[str, Any]) -> None:
    found = only(figures)
    assert min(found["predicted_step_s"], found["step_s"]) > 0


def only(figures: dict[str, Any]) -> Any:
    (found,) = figures.values()
    return found


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


@pytest.mark.parametrize("part", CHECKS)
def test_a_part_runs_whole_on_a_simulated_gpu(start, tmp_path, part: str):
    done = start(str(GPU / "main.py"), "out", part, "--smoke", afresh=True).finish()
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


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[TextIO]:
    """Give what a part that hangs tells of the processes that it has started."""
    parts(tmp_path, hanging=HANGING)
    with told(tmp_path / "hanging") as lines:
        yield lines


def check_nothing_is_left(line: str) -> None:
    *pids, place = line.split()
    assert all(has_ended(int(pid)) for pid in pids)
    assert Path(place).name.startswith("tmp")
    assert not Path(place).exists()


def test_a_part_that_hangs_is_ended_at_its_deadline_and_leaves_no_process(start, tmp_path, hanging):
    deadline_s = 2
    while not select.select([hanging], [], [], 0)[
        0
    ]:  # on a busy machine it may not have come so far
        deadline_s *= 2
        done = start(PROGRAM, str(deadline_s), "out", "hanging").finish()
        assert done.code == 1, done.out + done.err
        found = contents(tmp_path)["hanging"]
        assert found["outcome"] == "ended at its deadline"
        assert found["seconds"] >= deadline_s
    assert found["figures"] == {"a": {"b": 1}}
    check_nothing_is_left(hanging.readline())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_part_is_ended_with_the_command_and_its_figures_stay(start, tmp_path, hanging, number):
    command = start(PROGRAM, "600", "out", "hanging")
    line = hanging.readline()
    command.process.send_signal(number)
    assert command.finish().code not in (0, 1)
    check_nothing_is_left(line)
    assert "| hanging | unfinished | - | a: one |" in (tmp_path / "out" / "README.md").read_text()


# The program, which gets SIGTERM while it starts the part: that runs, and is not known yet.
SLOW_TO_START = f"""
import os, pathlib, runpy, signal, sys
sys.path[:0] = [{str(GPU)!r}, {str(GPU.parent)!r}]
import supervise

def slow(*arguments, **how):
    process = start(*arguments, **how)
    pathlib.Path("told").write_text(open("hanging").readline())
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()

start, supervise.start = supervise.start, slow
sys.argv[:] = [{PROGRAM!r}, "600", "out", "hanging"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_part_is_ended_though_the_command_is_before_it_knows_it(start, tmp_path, hanging):
    """On a busy machine the part was quicker; what it had started went on for ever."""
    assert start("-c", SLOW_TO_START).finish().code not in (0, 1)
    check_nothing_is_left((tmp_path / "told").read_text())


def test_a_measurement_that_cannot_be_made_is_refused(start, tmp_path, monkeypatch):
    for arguments in (["codecs"], ["codec", "--smoke"]):
        done = start(str(GPU / "main.py"), "out", *arguments).finish()
        assert (done.code, done.out) == (2, "")
        assert len(done.err.splitlines()) <= 2
    monkeypatch.delenv("PACELINE_SIMULATED_GPUS")
    done = start(str(GPU / "main.py"), "out").finish()
    assert (done.code, done.out) == (2, "")
    assert not (tmp_path / "out").exists()


def test_all_parts_together_take_less_than_thirteen_minutes(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    from main import DEADLINES_S

    assert sum(DEADLINES_S.values()) <= 780
    assert sorted(DEADLINES_S) == sorted(
        path.stem for path in (GPU / "evidence").glob("*.py") if "def run(" in path.read_text()
    )
