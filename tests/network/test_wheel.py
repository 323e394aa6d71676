"""Wheel between two hosts: what the network does changes the time, and never the result."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from hosts import Finished
from safetensors.torch import load_file

from processes import DEADLINE_S

PROGRAM = Path(__file__).parent / "programs" / "cut_off.py"
CUT_S = 20.0


def weights(home: Path) -> dict[str, torch.Tensor]:
    (folder,) = (home / "runs").iterdir()
    return load_file(folder / "model.safetensors")


def test_a_worker_that_is_cut_off_for_20_s_trains_as_if_it_had_not_been(
    on_hosts: Callable[..., tuple[Finished, Finished]], tmp_path: Path
) -> None:
    paceline = [sys.executable, "-m", "paceline"]
    keys = tmp_path / "keys"
    subprocess.run([*paceline, "hub", "--generate-keys", str(keys)], check=True, timeout=60)
    finished = on_hosts(1, str(PROGRAM), str(keys), str(CUT_S))
    assert [one.code for one in finished] == [0, 0], "".join(one.err for one in finished)
    sent = json.loads(finished[1].out)
    assert sent["after"] > 2 * sent["before"]  # it was cut off in mid-training
    home = tmp_path / "uncut"
    home.mkdir()
    alone = ["--workers", "1", "--set", "lanes=1", "--set", "staleness=0", "--epochs", "6"]
    uncut = [*paceline, "train", "lenet5", "--strategy", "wheel", "--profile-s", "0", *alone]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(uncut, cwd=home, check=True, timeout=DEADLINE_S, env=environment)
    own, other = weights(tmp_path), weights(home)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
