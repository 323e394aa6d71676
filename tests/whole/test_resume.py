"""Runs that are interrupted or killed, and gone on with: they end with the same bits."""

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import children_of, wait_for_checkpoint

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
QUICK = ("--profile-s", "0.2", "--batch-size", "24", "--epochs", "30")


@dataclass
class Runs:
    """The command line in a folder with the recipes; each run has an output of its own."""

    start: Callable
    folder: Path

    def begin(self, output: str, *arguments: str):
        return self.start("-m", "paceline", "train", *arguments, "--output", output)

    def resume(self, output: str, *arguments: str):
        again = "--resume", str(self.of(output)), "--profile-s", "0.2"
        return self.start("-m", "paceline", "train", *again, *arguments)

    def of(self, output: str) -> Path:
        (found,) = (self.folder / output).iterdir()
        return found

    def checkpoints(self, output: str) -> list[Path]:
        return sorted((self.folder / output).glob("*/checkpoints/step-*"))


@pytest.fixture
def runs(start, tmp_path: Path) -> Runs:
    shutil.copy(PROGRAMS / "small_recipes.py", tmp_path)
    return Runs(start, tmp_path)


def learnt(folder: Path) -> tuple[bytes, list[dict]]:
    """The bytes of the model, and its epochs but for their seconds."""
    epochs = json.loads((folder / "result.json").read_text())["epochs"]
    for epoch in epochs:
        del epoch["seconds"]
    return (folder / "model.safetensors").read_bytes(), epochs


RUNS = [
    ("host", "2", ()),
    ("tree", "2", ()),
    ("allreduce", "3", ()),  # sums of three depend on where they are cut
    ("allreduce", "2", ("--set", "codec=onebit")),  # has error feedback
    ("subbatch", "2", ("--set", "gradients=onebit")),
    ("hogbatch", "cpu:1", ("--policy", "hogbatch")),
    ("wheel", "1", ("--set", "lanes=1", "--set", "staleness=0", "--set", "head=last")),
    ("local", "2", ("--set", "sync_every=7")),
    ("local", "2", ("--set", "sync_every=8", "--set", "fragments=2", "--set", "codec=onebit")),
    ("local", "2", ("--set", "sync_every=8", "--set", "delay=3", "--set", "mixing=0.5")),
    ("host", "2", ("--accumulate", "3", "--clip-norm", "0.5", "--precision", "bfloat16")),
]


@pytest.mark.parametrize(("strategy", "workers", "extra"), RUNS)
def test_an_interrupted_run_goes_on_bit_for_bit(runs: Runs, strategy, workers, extra) -> None:
    recipe = {"subbatch": "classes", "hogbatch": "classes", "wheel": "plain"}.get(
        strategy, "with_dropout"
    )
    every = "0.2s" if strategy == "wheel" else "37"  # its workers take no steps together
    asked = (f"small_recipes:{recipe}", "--strategy", strategy, "--workers", workers)
    asked = (*asked, *QUICK, *extra, "--checkpoint-every", every)
    assert runs.begin("whole", *asked).finish().code == 0
    run = runs.begin("interrupted", *asked)
    wait_for_checkpoint(runs.folder / "interrupted", run)
    run.process.send_signal(signal.SIGINT)
    done = run.finish()
    assert done.code == 130, done.err
    assert f"--resume interrupted/{runs.of('interrupted').name} goes on" in done.err
    assert "Traceback" not in done.err
    assert not (runs.of("interrupted") / "result.json").exists()
    resumed = runs.resume("interrupted").finish()
    assert resumed.code == 0, resumed.err
    model, epochs = learnt(runs.of("interrupted"))
    expected, whole = learnt(runs.of("whole"))
    assert model == expected
    assert [one["test_loss"] for one in epochs] == [one["test_loss"] for one in whole]
    # What bodies of `wheel` have lost in an epoch is known to a hub as long as it lives.
    assert strategy == "wheel" or epochs == whole


def test_a_run_that_loses_workers_starts_again_and_says_so(runs: Runs) -> None:
    asked = ("small_recipes:with_dropout", "--strategy", "host", "--workers", "2", *QUICK)
    asked = (*asked, "--checkpoint-every", "20", "--restarts", "1")
    assert runs.begin("whole", *asked).finish().code == 0
    run = runs.begin("killed", *asked)
    wait_for_checkpoint(runs.folder / "killed", run)
    os.kill(run.workers()[1], signal.SIGKILL)
    done = run.finish()
    assert done.code == 0, done.err
    assert learnt(runs.of("killed")) == learnt(runs.of("whole"))
    (lost,) = json.loads((runs.of("killed") / "result.json").read_text())["lost"]
    assert "was ended by SIGKILL" in lost
    assert "restarted after step" in lost


def test_torchrun_starts_workers_again_from_the_last_checkpoint(runs: Runs) -> None:
    asked = ("small_recipes:with_dropout", "--strategy", "allreduce", "--workers", "2", *QUICK)
    asked = (*asked, "--checkpoint-every", "20")
    assert runs.begin("whole", *asked).finish().code == 0
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"
    asked = ("-m", "paceline", "train", *asked, "--output", "killed")
    run = runs.start(*torchrun, *asked)
    wait_for_checkpoint(runs.folder / "killed", run)
    os.kill(max(children_of(run.process.pid, "paceline")), signal.SIGKILL)
    done = run.finish()
    assert done.code == 0, done.err
    assert learnt(runs.of("killed")) == learnt(runs.of("whole"))
    (lost,) = json.loads((runs.of("killed") / "result.json").read_text())["lost"]
    assert lost.startswith("torchrun has started the workers again once; from the checkpoint after")


def test_another_number_of_workers_takes_the_same_samples(runs: Runs) -> None:
    asked = ("small_recipes:plain", "--strategy", "host", *QUICK, "--checkpoint-every", "37")
    assert runs.begin("whole", *asked, "--workers", "2").finish().code == 0
    run = runs.begin("interrupted", *asked, "--workers", "2")
    wait_for_checkpoint(runs.folder / "interrupted", run)
    run.process.send_signal(signal.SIGINT)
    assert run.finish().code == 130
    resumed = runs.resume("interrupted", "--workers", "3").finish()
    assert resumed.code == 0, resumed.err
    one, other = (
        load_file(runs.of(name) / "model.safetensors") for name in ("whole", "interrupted")
    )
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-4, atol=1e-5)
    losses = [
        [epoch["train_loss"] for epoch in learnt(runs.of(name))[1]]
        for name in ("whole", "interrupted")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_few_steps_that_are_left_are_measured_as_well_as_can_be(runs: Runs) -> None:
    asked = ("small_recipes:classes", "--strategy", "host", "--workers", "2", *QUICK[:-2])
    done = runs.begin("run", *asked, "--epochs", "1", "--checkpoint-every", "24").finish()
    assert done.code == 0, done.err
    resumed = runs.resume("run", "--epochs", "2").finish()
    assert resumed.code == 0, resumed.err
    assert len(learnt(runs.of("run"))[1]) == 2


@pytest.mark.parametrize("num_left", [0, 1])
@pytest.mark.parametrize(
    ("strategy", "recipe"), [("host", "with_dropout"), ("subbatch", "classes")]
)
def test_a_run_killed_at_its_very_end_has_its_result_when_resumed(
    runs: Runs, strategy, recipe, num_left: int
) -> None:
    asked = (f"small_recipes:{recipe}", "--strategy", strategy, "--workers", "2", *QUICK[:-2])
    last = str(50 - num_left)
    done = runs.begin("run", *asked, "--epochs", "2", "--checkpoint-every", last).finish()
    assert done.code == 0, done.err
    before, run = learnt(runs.of("run")), runs.of("run")
    for name in ("model.safetensors", "result.json", "trace.json", "report.html"):
        (run / name).unlink()
    resumed = runs.resume("run").finish()
    assert resumed.code == 0, resumed.err
    assert learnt(run) == before
    assert (run / "report.html").exists()


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(runs: Runs) -> None:
    asked = ("small_recipes:with_dropout", "--strategy", "tree", "--workers", "2", *QUICK)
    assert runs.begin("run", *asked, "--checkpoint-every", "100").finish().code == 0
    before = learnt(runs.of("run"))
    newest = runs.checkpoints("run")[-1] / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 8
    newest.write_bytes(data)
    resumed = runs.resume("run").finish()
    assert resumed.code == 0, resumed.err
    assert "model.safetensors" in resumed.err
    assert f"going on from that of step {int(runs.checkpoints('run')[0].name[5:])}" in resumed.err
    assert learnt(runs.of("run")) == before


def test_a_checkpoint_that_cannot_be_written_is_a_warning(runs: Runs) -> None:
    asked = ("small_recipes:plain", "--strategy", "host", "--workers", "2", *QUICK)
    assert runs.begin("run", *asked, "--checkpoint-every", "300").finish().code == 0
    before, kept = learnt(runs.of("run")), runs.checkpoints("run")
    folder = os.open(kept[0].parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # as another process that writes there
    try:
        done = runs.resume("run", "--checkpoint-every", "50").finish()
    finally:
        os.close(folder)
    assert done.code == 0, done.err
    assert "another process is writing there now" in done.err
    assert "the run goes on" in done.err
    assert (learnt(runs.of("run")), runs.checkpoints("run")) == (before, kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--batch-size", "30"), "resume: batch_size is 30 now, and was 24 in the run"),
        (("--seed", "3"), "resume: seed is 3 now, and was 0 in the run"),
        (("--optimizer", "sgd"), "resume: the optimizer of the checkpoint is AdamW, and not SGD"),
    ],
)
def test_what_does_not_fit_is_one_line(runs: Runs, change, message: str) -> None:
    asked = ("small_recipes:plain", "--strategy", "host", "--workers", "2", *QUICK)
    assert runs.begin("run", *asked, "--checkpoint-every", "100").finish().code == 0
    done = runs.resume("run", *change).finish()
    assert done.code == 2, done.err
    (line,) = {one for one in done.err.splitlines() if one.startswith("paceline: ")}
    assert message in line


@pytest.mark.parametrize(
    ("strategy", "workers", "extra"),
    [
        ("hogbatch", "cpu:1", ()),
        ("wheel", "1", ("--set", "head=last", "--checkpoint-every", "60s")),
        ("local", "2", ("--set", "sync_every=10")),
    ],
)
def test_another_strategy_is_refused_by_what_was_and_not_by_its_settings(
    runs: Runs, strategy, workers, extra
) -> None:
    asked = ("small_recipes:plain", "--strategy", "host", "--workers", "2", *QUICK)
    asked += ("--set", "chunk=1")
    assert runs.begin("run", *asked, "--checkpoint-every", "300").finish().code == 0
    settings = (runs.of("run") / "run.toml").read_text()
    done = runs.resume("run", "--strategy", strategy, "--workers", workers, *extra).finish()
    assert done.code == 2, done.err
    assert (runs.of("run") / "run.toml").read_text() == settings
    (line,) = [one for one in done.err.splitlines() if one.startswith("paceline: ")]
    assert line.startswith("paceline: resume: the run had ")
    assert line.endswith("; take that")


def test_a_host_run_goes_on_with_another_exchange(runs: Runs) -> None:
    asked = ("small_recipes:plain", "--strategy", "host", "--workers", "2", *QUICK)
    assert runs.begin("run", *asked, "--checkpoint-every", "300").finish().code == 0
    before = learnt(runs.of("run"))
    resumed = runs.resume("run", "--strategy", "allreduce").finish()
    assert resumed.code == 0, resumed.err
    assert learnt(runs.of("run")) == before  # sums of two are the same in any order


def test_a_folder_that_is_no_run_is_one_line(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = runs.start("-m", "paceline", "train", "--resume", str(tmp_path / "empty")).finish()
    assert done.code == 2
    assert done.err.startswith("paceline: resume: ")
    assert done.err.count("\n") == 1
