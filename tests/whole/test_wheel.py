"""Strategy wheel with real processes: equal to plain SGD, planned bytes, and killed processes."""

import signal
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import own_recipes
from faults import Pause, failpoints
from hubs import address_of, result_of
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.strategies.wheel import STRATEGY
from paceline.strategies.wheel.config import Wheel
from paceline.training.data import ShardedBatches
from paceline.training.recipes.recipe import Recipe

TRAIN = ("-m", "paceline", "train", "lenet5", "--strategy", "wheel", "--profile-s", "0.05")
HUB = ("-m", "paceline", "hub", "lenet5", "--epochs", "3")
ONE = ("--workers", "1", "--strategy-option", "lanes=1", "--strategy-option", "staleness=0")


def trained_in_one_piece(recipe: Recipe, settings: TrainSettings) -> dict[str, Tensor]:
    """Train with plain SGD; return the state."""
    torch.manual_seed(settings.seed)
    model = recipe.model().train()
    optimizer = torch.optim.SGD(model.parameters(), settings.learning_rate, settings.momentum)
    batches = ShardedBatches(len(recipe.samples), settings.batch_size, 0, 1, settings.seed)
    for step in range(settings.steps):
        epoch, first = divmod(step, len(batches))
        batches.set_epoch(epoch, first)
        batch = recipe.samples.__getitems__(next(iter(batches)))
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bfloat16"):
            loss = recipe.loss(model(**batch), batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_recipe_of_mappings_trains_as_plain_sgd(monkeypatch, tmp_path: Path, precision):
    """Compare bit for bit, with clipped gradients and tests, over two and a half epochs.

    A sample is a mapping, which is both inputs and targets.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(own_recipes.__file__).parent))
    progress, path = MagicMock(), tmp_path / "model.safetensors"
    settings = TrainSettings(
        model="own_recipes:tested_fields", strategy="wheel", workers=1, batch_size=12, seed=5,
        learning_rate=0.5, momentum=0.5, profile_s=0.05, steps=15, clip_norm=0.2,
        evaluate_every=4, precision=precision,
    )  # fmt: skip
    config = Wheel(workers=1, lanes=1, staleness=0, head="head")
    alone = Group.alone(torch.device("cpu"), settings.deadline_s)
    session = TrainingSession(settings, STRATEGY, config, "fields", alone, progress)
    with session.strategy.runner().start(session) as runner:
        assert runner.measure() is not None
        outcome = runner.train(config)
        runner.save(path)
    own, other = load_file(path), trained_in_one_piece(own_recipes.tested_fields(), settings)
    assert [name for name in other if not torch.equal(own[name], other[name])] == []
    nbytes = {row.purpose: row.nbytes for row in outcome.traffic}
    assert nbytes == {row.purpose: row.planned_nbytes for row in outcome.traffic}
    assert not (*outcome.faults, *outcome.lost)
    # The labels are the whole mapping of each sample: five numbers, a weight and a class.
    num_samples = 2 * 64 + 32
    assert nbytes["labels"] == num_samples * (5 * 8 + 4 + 8)
    assert sum(call.args[0] for call in progress.advance.call_args_list) == num_samples
    assert [one.num_steps for one in outcome.evaluations] == [4, 6, 8, 12, 15]
    assert progress.evaluation.call_count == 2  # within epochs
    at_the_ends = [outcome.evaluations[number].test_loss for number in (1, 3, 4)]
    assert at_the_ends == [epoch.test_loss for epoch in outcome.epochs]


@pytest.mark.parametrize(
    ("workers", "options"),
    [(2, ()), pytest.param(3, ("head=loss", "staleness=4"), marks=pytest.mark.slow)],
)
def test_a_run_from_the_command_line(start, tmp_path: Path, workers: int, options):
    codec = "gradients=dynamic8,activations=dynamic8,activation_gradients=half,parameters=bfloat16"
    own = [word for option in ("lanes=2", *options) for word in ("--strategy-option", option)]
    arguments = ("--workers", str(workers), *own, "--epochs", "2")
    result = result_of(start(*TRAIN, *arguments, "--codec", codec, "--json"))
    assert result["epochs"][-1]["score"] > (0.75 if options else 0.8)
    assert all(row["nbytes"] == row["planned_nbytes"] for row in result["traffic"])
    assert (result["faults"], result["lost"]) == ([], [])
    assert min(result["predicted_step_s"], result["step_s"]) > 0
    devices = [f"cpu{1 + number}" for number in range(-(-workers // 2))]
    assert list(result["utilisation"]) == list(result["predicted_utilisation"]) == devices
    updates = result["updates"]
    assert sum(updates["staleness"]["all workers"].values()) == updates["count"]
    assert list(updates["by_worker"].values()) == [2 * 23] * workers
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").exists()
    assert load_file(folder / "model.safetensors")


def test_a_killed_hub_resumes_from_its_checkpoint(start, worker_of, paceline, tmp_path: Path):
    assert paceline("keys", "keys").code == 0
    keys, kept = ("--keys", "keys"), ("--checkpoint-every", "0.05s")
    with failpoints({"at": "checkpoint.written", "do": "SIGKILL"}):  # only hubs write them
        bind = ("--listen", "tcp://127.0.0.1:0", "--profile-s", "0")
        hub = start(*HUB, *ONE, *keys, *kept, *bind)
        address = address_of(hub)
        worker = worker_of(address, "--worker-ids", "0", *keys)
        hub.process.wait()
    (folder,) = (tmp_path / "runs").iterdir()
    # The model, data and other settings are read from the folder of the run.
    result = result_of(start(*HUB[:3], "--resume", str(folder), "--listen", address, "--json"))
    assert worker.finish().code == 0
    assert (result["updates"]["count"], len(result["epochs"])) == (3 * 23, 3)
    whole = result_of(start(*TRAIN, *ONE, "--epochs", "3", "--output", "whole", "--json"))
    own = load_file(tmp_path / "runs" / result["id"] / "model.safetensors")
    other = load_file(tmp_path / "whole" / whole["id"] / "model.safetensors")
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.slow
def test_a_worker_profiles_again_for_a_restarted_hub(start, worker_of, tmp_path: Path):
    pause, hub = Pause(tmp_path / "pause"), (*HUB, *ONE, "--profile-s", "0.1", "--listen")
    first = start(*hub, "tcp://127.0.0.1:0")
    address = address_of(first)
    with failpoints(pause.at("worker.profiling", visit=1)):
        worker = worker_of(address, "--worker-ids", "0")
    pause.reached()
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    again = start(*hub, address, "--json")
    address_of(again)
    pause.go_on()
    assert len(result_of(again)["epochs"]) == 3
    assert worker.finish().code == 0


@pytest.mark.slow
def test_a_run_continues_without_a_killed_process_of_workers(start):
    with failpoints({"at": "worker.pushed", "worker": 0, "step": 9, "do": "SIGKILL"}):
        run = start(
            *TRAIN, "--workers", "4", "--strategy-option", "lanes=2", "--epochs", "2", "--json"
        )
        result = result_of(run)
    assert {one.split()[1] for one in result["lost"]} == {"0", "1"}  # two lanes of one process
    assert all("SIGKILL" in one for one in result["lost"])
    assert len(result["epochs"]) == 2
