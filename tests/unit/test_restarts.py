"""Restart of a run that lost a worker, from the newest undamaged checkpoint if any."""

from pathlib import Path

import torch

from paceline.checkpoints.folder import CheckpointFolder
from paceline.core.settings import TrainSettings
from paceline.exchange.checkpoints import CHECKPOINTS
from paceline.runs.restarts import RunRequest, restarted


def request_in(output: Path) -> RunRequest:
    settings = TrainSettings(model="lenet5", output=output)
    return RunRequest(verb="train", settings=settings, run_id="mine")


def test_a_run_restarts_from_its_newest_undamaged_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "mine" / CHECKPOINTS, keep=2)
    folder.path.mkdir(parents=True)
    for step in (3, 5):
        written = folder.write(step, {"model/weight": torch.zeros(2)}, {})
    (written / "model.safetensors").write_bytes(b"damaged")
    again = restarted(request_in(tmp_path), "worker 1 was lost")
    assert "step 3" in again.lost[0]
    assert isinstance(again.settings, TrainSettings)
    assert again.settings.resume == tmp_path / "mine"


def test_without_a_checkpoint_a_run_starts_again_in_its_folder(tmp_path: Path) -> None:
    request = request_in(tmp_path)
    again = restarted(request, "worker 1 was lost")
    assert again == request.model_copy(update={"lost": again.lost})
    assert again.lost
