"""Wheel between two hosts: what the network does changes the time, and never the result."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import Started

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "cut_off.py"
CUT_S = 20.0


def weights(home: Path) -> dict[str, torch.Tensor]:
    (folder,) = (home / "runs").iterdir()
    return load_file(folder / "model.safetensors")


def test_a_worker_that_is_cut_off_for_20_s_trains_as_if_it_had_not_been(on_hosts, tmp_path):
    paceline = [sys.executable, "-m", "paceline"]
    keys = tmp_path / "keys"
    assert Started([*paceline, "hub", "--generate-keys", str(keys)], tmp_path).finish().code == 0
    finished = on_hosts(1, str(PROGRAM), str(keys), str(CUT_S))
    assert [one.code for one in finished] == [0, 0], "".join(one.err for one in finished)
    sent = json.loads(finished[1].out)
    assert sent["after"] > 2 * sent["before"]  # it was cut off in mid-training
    home = tmp_path / "uncut"
    home.mkdir()
    alone = ["--workers", "1", "--set", "lanes=1", "--set", "staleness=0", "--epochs", "6"]
    uncut = [*paceline, "train", "lenet5", "--strategy", "wheel", "--profile-s", "0", *alone]
    assert Started(uncut, home).finish().code == 0
    own, other = weights(tmp_path), weights(home)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
