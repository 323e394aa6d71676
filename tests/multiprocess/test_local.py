"""Strategy local as real processes: workers that are killed, stopped, cut off and come back."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from local_runs import STEPS_PER_EPOCH, LocalRuns, check_whole, first_loss
from rpc_exchange import free_port

pytestmark = pytest.mark.slow

MANY = 60  # epochs: a run that takes minutes while it is slow, and seconds when it is not
ROUNDS = ("--set", "sync_every=8", "--set", "fragments=2")
DELAY = ("--set", "delay=2", "--set", "mixing=0.5")
JOINS = "takes part from round"


@pytest.mark.parametrize("steps", [81, 82, 83])
def test_a_last_round_may_be_shorter_than_the_delay(runs: LocalRuns, steps: int) -> None:
    delay = ("--set", "delay=3", "--set", "mixing=0.5")
    result = runs.train(*ROUNDS, *delay, "--steps", str(steps), workers=3).result()
    check_whole(result, 5)
    assert result["lost"] == []


@pytest.mark.parametrize("options", [(), DELAY], ids=["plain", "delay"])
def test_a_killed_worker_is_started_again_and_joins_while_the_others_go_on(
    runs: LocalRuns, options: tuple[str, ...]
) -> None:
    slow = runs.flag("slow")
    run = runs.train(*ROUNDS, *options, "--evaluate-every", "8", workers=3, epochs=MANY)
    run.until("step 8")
    killed = run.worker(1)
    os.kill(killed, signal.SIGKILL)
    said = run.until(f"(process {killed}) was ended by SIGKILL")
    assert "worker 1" in said
    assert "the others go on, with its share of the samples" in said
    assert "worker 1 " in run.until(JOINS)
    assert run.worker(1) != killed
    run.until("step ")  # it takes part in rounds after that
    slow.unlink()
    result = run.result()
    check_whole(result, MANY)
    assert result["lost"] == [f"worker 1 (process {killed}) was ended by SIGKILL"]
    assert result["evaluations"][-1]["num_steps"] == MANY * STEPS_PER_EPOCH
    assert not [path for path in Path("/dev/shm").iterdir() if "paceline" in path.name]


def test_a_stopped_worker_is_left_out_after_the_deadline_and_comes_back(runs: LocalRuns) -> None:
    slow = runs.flag("slow")
    run = runs.train(*ROUNDS, "--evaluate-every", "8", "--deadline-s", "6", epochs=MANY)
    run.until("step 8")
    stopped = run.worker(0)
    os.kill(stopped, signal.SIGSTOP)
    said = run.until("the others go on")
    assert re.search(r"worker 0 (was silent|has sent nothing) for \d+ s", said), said
    run.until("step ")  # the other one trains by itself
    time.sleep(7)  # longer than its deadline, of which it knows nothing
    os.kill(stopped, signal.SIGCONT)
    assert "worker 0 " in run.until(JOINS)
    assert run.worker(0) == stopped
    run.until("step ")
    slow.unlink()
    result = run.result()
    check_whole(result, MANY)
    assert any(one.startswith("worker 0 ") for one in result["lost"])


def test_a_worker_that_hangs_before_its_speed_is_known_is_left_out(runs: LocalRuns) -> None:
    # Its process answers; only its part does not come.
    runs.flag("hang")
    run = runs.train(*ROUNDS, "--deadline-s", "3")
    said = run.until("the others go on")
    assert re.search(r"worker [01] has sent nothing for \d+ s", said), said
    result = run.result()
    check_whole(result, 4)


def test_cut_connections_change_no_bit(runs: LocalRuns, proxy) -> None:
    whole = runs.train(*ROUNDS, epochs=MANY).result()
    slow, port = runs.flag("slow"), free_port()
    hub = runs.hub(
        *ROUNDS, "--bind", f"tcp://127.0.0.1:{port}", "--evaluate-every", "8", epochs=MANY
    )
    hub.address()
    between = proxy(port)
    workers = [
        runs.worker(f"tcp://127.0.0.1:{at}", number)
        for number, at in enumerate((port, between.port))
    ]
    hub.until("step 8")
    for share in (0.2, 1.1, 0.6, 1.7, 0.4):  # in the middle of messages, in both directions
        between.wait_for(int(2000 * share), 600)
        between.cut()
    slow.unlink()
    result = hub.result()
    for worker in workers:
        worker.finish()
    assert between.num_connections >= 4
    assert result["lost"] == []
    assert runs.model(result) == runs.model(whole)


def test_a_worker_that_is_cut_off_for_long_is_left_out_and_comes_back(
    runs: LocalRuns, proxy
) -> None:
    slow, port = runs.flag("slow"), free_port()
    deadline = ("--deadline-s", "6")
    bind = ("--bind", f"tcp://127.0.0.1:{port}", "--evaluate-every", "8")
    hub = runs.hub(*ROUNDS, *bind, *deadline, epochs=MANY)
    hub.address()
    between = proxy(port)
    runs.worker(f"tcp://127.0.0.1:{port}", 0)
    cut_off = runs.worker(f"tcp://127.0.0.1:{between.port}", 1, "--deadline-s", "600")
    hub.until("step 8")
    between.stop()
    assert "worker 1 " in hub.until("the others go on")
    hub.until("step ")
    between.go_on()
    assert "worker 1 " in hub.until(JOINS)
    slow.unlink()
    result = hub.result()
    check_whole(result, MANY)
    assert {one.split()[1] for one in result["lost"]} == {"1"}
    assert "the hub has restarted" in cut_off.finish().err


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_a_group_of_which_all_were_killed_does_not_begin_anew(
    runs: LocalRuns, *, together: bool
) -> None:
    slow = runs.flag("slow")
    run = runs.train(*ROUNDS, "--evaluate-every", "8", epochs=MANY)
    slow.unlink()
    run.until("epoch 8/")
    runs.flag("slow")
    if together:
        for pid in (run.worker(0), run.worker(1)):
            os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            run.until(JOINS)
    else:
        for number in (0, 1):
            os.kill(run.worker(number), signal.SIGKILL)
            assert f"worker {number} " in run.until(JOINS)
    slow.unlink()
    result = run.result()
    check_whole(result, MANY)
    assert len(result["lost"]) == 2
    begin = first_loss()
    learnt = [one["test_loss"] for one in result["evaluations"] if one["num_steps"] >= 100]
    assert max(learnt) < begin / 4, (begin, learnt)


def test_a_lone_new_worker_takes_what_the_group_has_learnt(runs: LocalRuns) -> None:
    slow = runs.flag("slow")
    hub = runs.hub(*ROUNDS, "--evaluate-every", "8", "--wait-s", "600", epochs=MANY)
    address = hub.address()
    workers = [runs.worker(address, number) for number in range(2)]
    slow.unlink()
    hub.until("epoch 8/")
    slow.touch()
    for worker in workers:
        worker.started.process.kill()
        hub.until("the others go on")
    runs.worker(address, 1)
    assert "worker 1 " in hub.until(JOINS)
    slow.unlink()
    result = hub.result()
    check_whole(result, MANY)
    learnt = [one["test_loss"] for one in result["evaluations"] if one["num_steps"] >= 100]
    assert max(learnt) < first_loss() / 4


@pytest.mark.parametrize(
    "options",
    [(), ("--set", "codec=dynamic8"), DELAY],
    ids=["plain", "codec", "delay"],
)
def test_a_worker_whose_parameters_are_nan_is_left_out_and_takes_the_groups(
    runs: LocalRuns, options: tuple[str, ...]
) -> None:
    slow = runs.flag("slow")
    run = runs.train(*ROUNDS, *options, "--evaluate-every", "8", epochs=MANY)
    run.until("step 8")
    runs.flag("poison")
    said = run.until("has parameters that are NaN or infinite")
    number = re.search(r"worker (\d)", said)[1]
    assert f"worker {number} " in run.until(JOINS)
    slow.unlink()
    result = run.result()
    check_whole(result, MANY)
    assert result["lost"] == [f"worker {number} has parameters that are NaN or infinite"]
    assert result["evaluations"][-1]["test_loss"] < first_loss() / 4


def one_line(err: str) -> str:
    """Return the only line in which the command says why it has ended."""
    (line,) = (one for one in err.splitlines() if one.startswith("paceline: "))
    return line


@pytest.mark.parametrize("how", ["at once", "by the rate"])
def test_all_workers_nan_end_the_run_by_one_line(runs: LocalRuns, how: str) -> None:
    if how == "at once":
        runs.flag("poison-all")
        run = runs.train(*ROUNDS)
    else:
        diverges = ("--optimizer", "sgd", "--learning-rate", "1e30")
        run = runs.train(*ROUNDS[:2], *diverges, recipe="local_recipes:line")
    done = run.finish(2)
    said = (
        "learning_rate: the parameters or losses of all workers are NaN or infinite; "
        "choose a smaller one"
    )
    assert said in one_line(done.err)
