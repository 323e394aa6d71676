"""What strategy local refuses: runs that cannot be, and workers that are not like the others."""

import json
import re
import shutil
from pathlib import Path

import pytest

from launched import PROGRAMS
from local_runs import RECIPE, LocalRuns, check_whole

ROUNDS = ("--set", "sync_every=8", "--set", "fragments=2")
TRAIN = ("train", RECIPE, "--strategy", "local", "--batch-size", "24", "--profile-s", "0")
OTHER = """
from local_recipes import *
from local_recipes import steady as _steady

def steady():
    return _steady({width}, {num_samples})
"""
OLDER = """
import sys
from paceline.cli import main
from paceline.rpc import workers
workers.version = lambda name: "0.0.1"
main()
"""
WITHOUT_ONEBIT = """
from paceline.core import wire_format
del wire_format.WIRE_FORMATS["onebit"]
from paceline.cli import main
main()
"""


def one_line(err: str) -> str:
    """Return the only line in which the command says why it has ended."""
    (line,) = (one for one in err.splitlines() if one.startswith("paceline: "))
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "sync_every=0"), "sync_every: Input should be greater than or equal to 1"),
        (
            ("--set", "sync_every=100", "--epochs", "4"),
            "sync_every: 100 steps are more than the 80 of the run",
        ),
        (
            ("--set", "sync_every=4", "--set", "fragments=5"),
            "fragments: 5 are more than the 4 steps of a round",
        ),
        (
            ("--set", "sync_every=20", "--set", "fragments=9"),
            "fragments: 9 are more than the 3 layers; take at most that many",
        ),
        (
            ("--set", "sync_every=20", "--set", "fragments=2", "--set", "delay=10"),
            "delay: 10 steps; a fragment must have come before the next is sent, at most 9 with "
            "fragments=2 and sync_every=20",
        ),
        (("--set", "mixing=1"), "mixing: Input should be less than 1"),
        (("--set", "codec=gzip"), "codec: 'gzip' is not known; choose one of "),
        (("--batch-size", "1"), "batch_size: 1 samples cannot be shared by 2 workers"),
        (("--set", "hub=host0"), "hub names a host of a machine file"),
    ],
)
def test_a_run_that_cannot_be_is_refused_by_one_line(
    runs: LocalRuns, paceline, options: tuple[str, ...], message: str
) -> None:
    done = paceline(*TRAIN, "--workers", "2", *options)
    assert done.code == 2, done.err
    assert message in one_line(done.err)
    assert "Traceback" not in done.err
    runs_made = list(runs.folder.glob("runs/*"))
    assert not runs_made


def other_folder(runs: LocalRuns, width: int = 16, num_samples: int = 480) -> Path:
    """Make a folder with a recipe of the same name for another model, or of other data."""
    folder = runs.folder / "other"
    (folder / "theirs").mkdir(parents=True)
    shutil.copy(PROGRAMS / "local_recipes.py", folder / "theirs_recipes.py")
    text = OTHER.format(width=width, num_samples=num_samples)
    (folder / "local_recipes.py").write_text(text.replace("local_recipes", "theirs_recipes"))
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 17}, r"parameters, first\.weight: torch\.float32 \[17, 6\] and not .*\[16, 6\]"),
        ({"num_samples": 504}, r"samples: 504 and not 480"),
    ],
    ids=["another model", "other data"],
)
def test_a_worker_with_another_recipe_is_refused_and_another_takes_its_place(
    runs: LocalRuns, change: dict[str, int], said: str
) -> None:
    hub = runs.hub(*ROUNDS)
    address = hub.address()
    first = runs.worker(address, 0)
    wrong = runs.worker(address, 1, folder=other_folder(runs, **change))
    refused = wrong.finish(2)
    assert re.search(rf"it has another run than the hub: {said}", one_line(refused.err))
    hub.until("worker 1 is refused: it has another run than the hub")
    right = runs.worker(address, 1)
    result = hub.result()
    check_whole(result, 4)
    first.finish()
    right.finish()


def test_without_the_refused_worker_the_others_begin_after_the_wait(runs: LocalRuns) -> None:
    hub = runs.hub(*ROUNDS, "--wait-s", "20")
    address = hub.address()
    first = runs.worker(address, 0)
    wrong = runs.worker(address, 1, folder=other_folder(runs, width=17))
    wrong.finish(2)
    hub.until("worker 1 has not come; the others begin without it")
    result = hub.result()
    first.finish()
    check_whole(result, 4)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (OLDER, r"the hub refuses this worker: layout: .* they differ in .* or the version"),
        (WITHOUT_ONEBIT, r"codec: 'onebit' is not known; choose one of "),
    ],
    ids=["another version", "codec"],
)
def test_a_worker_of_another_paceline_is_refused(runs: LocalRuns, program: str, said: str) -> None:
    hub = runs.hub(*ROUNDS, "--set", "codec=onebit", workers=1)
    address = hub.address()
    (runs.folder / "another.py").write_text(program)
    refused = runs.worker(address, 0, program=("another.py",)).finish(2)
    assert re.search(said, one_line(refused.err))
    right = runs.worker(address, 0)
    result = hub.result()
    right.finish()
    check_whole(result, 4)
    assert result["lost"] == []


def test_a_replica_with_other_bits_is_noticed_and_takes_the_groups(runs: LocalRuns) -> None:
    hub = runs.hub(*ROUNDS, "--evaluate-every", "8")
    address = hub.address()
    workers = [
        runs.worker(address, 0),
        runs.worker(address, 1, program=(str(PROGRAMS / "local_corrupted.py"), "3")),
    ]
    said = hub.until("other bits")
    assert "worker 1 has a copy of the group's parameters with other bits after exchange 2" in said
    result = hub.result()
    check_whole(result, 4)
    assert result["lost"] == [
        "worker 1 has a copy of the group's parameters with other bits after exchange 2"
    ]
    for worker in workers:
        worker.finish()


def test_a_worker_that_is_one_too_many_is_named(runs: LocalRuns) -> None:
    hub = runs.hub(*ROUNDS)
    address = hub.address()
    first = runs.worker(address, 0)
    beyond = runs.worker(address, 2)
    assert "worker: 2 is not one of 0 to 1" in one_line(beyond.finish(2).err)
    several = runs.worker(address, 1, "--as", "1,2")
    assert "worker: 2 is not one of 0 to 1" in one_line(several.finish(2).err)
    right = runs.worker(address, 1)
    check_whole(hub.result(), 4)
    first.finish()
    right.finish()


def test_a_loss_that_is_not_finite_is_nobodys_fault_and_ends_the_run(runs: LocalRuns) -> None:
    hub = runs.hub(*ROUNDS, recipe="local_recipes:untestable")
    address = hub.address()
    workers = [runs.worker(address, number) for number in range(2)]
    done = hub.finish(2)
    said = "learning_rate: the parameters or losses of all workers are NaN or infinite; choose"
    assert said in one_line(done.err)
    assert "refused" not in done.err
    for worker in workers:
        assert said in worker.finish(2).err


def test_workers_that_all_fail_again_and_again_end_the_run_with_what_they_said(
    runs: LocalRuns,
) -> None:
    # At once, and not after ten minutes (wait_s): nobody of elsewhere can come.
    done = runs.train(*ROUNDS, recipe="local_recipes:failing").finish(1)
    said = (
        r"no worker is left; worker [01] has failed: RuntimeError: bang \(worker [01] at local_rec"
    )
    assert re.search(said, one_line(done.err))


# Of 3 ms a step and of 300 ms: a hundredth of the samples gains less than the planner asks for.
UNEVEN = """
import os, time
from local_recipes import *
from local_recipes import loss as _loss, steady as _steady
from dataclasses import replace

pytestmark = pytest.mark.slow

def loss(outputs, targets):
    if torch.is_grad_enabled():
        time.sleep(0.3 if os.path.exists("here-is-slow") else 0.003)
    return _loss(outputs, targets)

def steady():
    return replace(_steady(), loss=loss)
"""


@pytest.mark.parametrize("force", [False, True])
def test_a_worker_that_would_not_help_is_refused_unless_by_force(
    runs: LocalRuns, *, force: bool
) -> None:
    folders = [runs.folder / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
        (folder / "uneven.py").write_text(UNEVEN)
        shutil.copy(PROGRAMS / "local_recipes.py", folder)
    (folders[1] / "here-is-slow").touch()
    shutil.copy(folders[0] / "uneven.py", runs.folder)
    asked = ("--balance", "auto", "--profile-s", "0.5", *(("--force",) if force else ()))
    hub = runs.hub("--set", "sync_every=8", *asked, recipe="uneven:steady", epochs=2)
    address = hub.address()
    workers = [runs.worker(address, number, folder=folders[number]) for number in range(2)]
    done = hub.finish(0 if force else 2)
    verdict = r"worker 1, which computes [\d.]+ samples/s, would [^:]*: with it all reach [\d.]+ "
    assert re.search(verdict, done.err)
    assert re.search(r"worker 0, which computes [\d.]+ samples/s, helps", done.err)
    for worker in workers:
        ended = worker.finish(0 if force else 2)
        assert force or "--force has all take part" in ended.err
    if not force:
        assert "--force has all take part" in one_line(done.err)
        assert not (runs.folder / "runs" / "model.safetensors").exists()
        return
    result = json.loads(done.out)
    check_whole(result, 2)
    assert result["shares"][0] > result["shares"][1]
