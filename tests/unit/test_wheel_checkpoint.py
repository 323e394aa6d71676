"""Snapshots of a parameter server: going on from one is as if nothing had happened."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halved import CASES, Case, Make, ManualWorker, batches, equal, serve
from paceline.checkpoints.folder import CheckpointFolder, Loaded
from paceline.checkpoints.writer import BackgroundWriter
from paceline.core.outcome import Epoch
from paceline.strategies.wheel.checkpoint import Checkpoints, ServerProgress, load, state_of
from paceline.strategies.wheel.server import ParameterServer
from paceline.training.models.networks import MLP
from refusals import refused

OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.01, amsgrad=True),
}
RUN, LAYOUT = "run-1", '{"settings": {"batch_size": 32}}'


def pair(
    case: Case = CASES["mlp"],
    first: str = "layers.3",
    make: Make = OPTIMIZERS["momentum"],
    num_workers: int = 2,
) -> tuple[ParameterServer, list[ManualWorker]]:
    return serve(case, first, make, num_workers, staleness=None)


def mlp(**options) -> ParameterServer:
    return pair(**options)[0]


def train(server: ParameterServer, hands: list[ManualWorker], case: Case, steps: range) -> None:
    """Take steps of two workers in turn, of which the second's gradients are one update old."""
    source = list(batches(case, 2 * steps.stop))
    for step in steps:
        versions = [hand.fetch() for hand in hands]
        for hand, version in zip(hands, versions, strict=True):
            gradients, _ = hand.forward(step, version, *source[2 * step + hand.worker])
            server.update(hand.worker, step, version, gradients)


def state(server: ParameterServer) -> list[Tensor]:
    return [value.clone() for value in server.model.state_dict().values()]


def save_here(folder: Path, server: ParameterServer) -> None:
    writer = BackgroundWriter(CheckpointFolder(folder))
    assert writer.save(server.version, *state_of(server, RUN, LAYOUT), wait=True)
    assert writer.written_step == server.version


def load_here(
    folder: Path, server: ParameterServer, **options: str
) -> tuple[Loaded, ServerProgress]:
    return load(CheckpointFolder(folder), server, **({"layout": LAYOUT} | options))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "first"), [("mlp", "layers.3"), ("dropping", "norm")])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    tmp_path: Path, name: str, first: str, optimizer: str
):
    """Parameters, running means in the head, the optimizer's state, and the dropout to come."""
    case, make = CASES[name], OPTIMIZERS[optimizer]
    (whole, own), (before, lost), (after, again) = (pair(case, first, make) for _ in range(3))
    torch.manual_seed(8)
    train(whole, own, case, range(10))
    torch.manual_seed(8)
    train(before, lost, case, range(5))
    save_here(tmp_path, before)
    torch.manual_seed(99)
    _, progress = load_here(tmp_path, after, run_id=RUN)
    assert (progress.run_id, progress.version, after.version) == (RUN, 10, 10)
    train(after, again, case, range(5, 10))
    assert equal(state(after), state(whole))
    assert after.updates == whole.updates
    assert after.updates.staleness["all workers"] == {0: 10, 1: 10}
    assert after.updates.by_worker == {"worker0": 10, "worker1": 10}


def test_a_step_that_the_snapshot_has_is_not_applied_again_and_a_half_done_one_is_not_kept(
    tmp_path: Path,
):
    case, (server, hands) = CASES["mlp"], pair()
    train(server, hands, case, range(3))
    hands[1].forward(3, hands[1].fetch(), case.inputs(), case.labels())
    save_here(tmp_path, server)
    after = mlp()
    load_here(tmp_path, after)
    before = state(after)
    assert after.workers.of(1).half is None
    assert not after.workers.of(1).is_live
    assert after.workers.of(0).next_step == 3
    assert ManualWorker(after, hands[0].halves).step(2, case.inputs(), case.labels())[0] == 5
    assert equal(state(after), before)


def test_a_snapshot_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog):
    with refused(tmp_path):  # there is none yet
        load_here(tmp_path, mlp())
    (tmp_path / "file").touch()
    server = mlp()
    checkpoints = Checkpoints(tmp_path / "file" / "kept", 0.0, server, RUN, LAYOUT)
    server.version = 1
    checkpoints.close([])
    assert "Not a directory" in caplog.text


@pytest.mark.parametrize(("every_s", "versions"), [(0.0, (1, 2)), (1000.0, (2,))])
def test_one_is_written_when_it_is_due_and_at_the_end(tmp_path: Path, every_s: float, versions):
    server, folder = mlp(), CheckpointFolder(tmp_path, keep=9)
    checkpoints = Checkpoints(tmp_path, every_s, server, RUN, LAYOUT)
    checkpoints.save_if_due([])  # no update yet
    for server.version in (1, 2):
        checkpoints.save_if_due([])
        checkpoints.close()
    checkpoints.close([])
    assert folder.steps == versions


def test_a_resumed_server_has_the_epochs_that_all_have_completed_and_says_what_it_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    epochs = [Epoch(number, 0.5, float("nan"), 0.9, 1.0) for number in (1, 2)]
    server = mlp()
    checkpoints = Checkpoints(tmp_path, 0.0, server, RUN, LAYOUT)
    for version in (1, 2):
        server.version = version
        for worker, num_steps in ((0, 7), (1, 5)):
            server.workers.of(worker).complete(num_steps, version)
        checkpoints.close(epochs)
    (tmp_path / "step-00000002" / "server.json").unlink()
    after, found = mlp(), []
    line = Checkpoints(tmp_path, 60.0, after, RUN, LAYOUT).resume(found, steps_per_epoch=4)
    assert repr(found) == repr(epochs[:1])
    assert "[7, 5]" in line
    assert "step-00000002: server.json" in caplog.text
    assert (after.version, after.workers.of(1).next_step) == (1, 5)


@pytest.mark.parametrize(
    ("build", "options", "field"),
    [
        (mlp, {"run_id": "run-2"}, None),
        (mlp, {"layout": '{"settings": {"batch_size": 64}}'}, "resume"),
        (lambda: mlp(num_workers=3), {}, None),
        (lambda: mlp(make=OPTIMIZERS["adam"]), {}, None),
        (lambda: mlp(case=CASES["mlp"]._replace(build=lambda: MLP([12, 9, 7, 4]))), {}, None),
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, build: Callable[[], ParameterServer], options: dict, field: str | None
):
    save_here(tmp_path, mlp())
    server = build()
    before = state(server)
    with refused(field or tmp_path / "step-00000000"):
        load_here(tmp_path, server, **options)
    assert equal(state(server), before)
    assert server.version == 0


@pytest.mark.parametrize("change", [{"version": "many"}, {"other": 1}, {"workers": [3, 4]}])
def test_the_progress_of_something_else_is_refused(tmp_path: Path, change: dict[str, object]):
    tensors, parts = state_of(mlp(), RUN, LAYOUT)
    changed = parts | {"server": parts["server"] | change}
    BackgroundWriter(CheckpointFolder(tmp_path)).save(1, tensors, changed, wait=True)
    with refused(tmp_path / "step-00000001") as caught:
        load_here(tmp_path, mlp())
    assert f"server.json: {next(iter(change))}" in str(caught.value)
