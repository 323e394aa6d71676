"""Training and probing on two hosts of one machine; a cut connection does not change results."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hosts import Finished, TwoHosts
from safetensors.torch import load_file

from paceline.records.machine_file import read_machine
from processes import DEADLINE_S, ENVIRONMENT, Started

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
PROGRAMS = TESTS / "network" / "programs"
CUT_S = 20.0
OnHosts = Callable[..., tuple[Finished, Finished]]


@pytest.fixture
def on_hosts(hosts: TwoHosts, tmp_path: Path) -> OnHosts:
    """Run `python ARGUMENTS` as `per_host` ranks on each host, and wait for both hosts."""

    def run(per_host: int, *arguments: str) -> tuple[Finished, Finished]:
        command = [sys.executable, *arguments]
        return hosts.run(command, per_host, ENVIRONMENT, cwd=tmp_path, deadline_s=DEADLINE_S)

    return run


def succeeded(finished: tuple[Finished, Finished]) -> tuple[Finished, Finished]:
    assert [one.code for one in finished] == [0, 0], "".join(one.err for one in finished)
    return finished


@pytest.mark.parametrize("exchange", ["host", "tree"])
def test_two_ranks_on_each_train_as_one_process_does(on_hosts: OnHosts, exchange: str) -> None:
    program = str(TESTS / "beside_one_process.py")
    finished = succeeded(on_hosts(2, program, exchange, "float64"))
    rows = [json.loads(line) for one in finished for line in one.out.splitlines()]
    assert sorted(row["rank"] for row in rows) == [0, 1, 2, 3]
    assert max(row["error"] for row in rows) < 1e-12
    assert len({tuple(row["bits"]) for row in rows}) == 1
    # With `host`, the first rank of each host exchanges sums with the other host. The other rank
    # records the wait as a send, so that a report does not show it as idle.
    between = {row["rank"] for row in rows if any("send" in name for name in row["spans"])}
    assert between == {0, 1, 2, 3}


def test_the_wire_between_hosts_is_measured(on_hosts: OnHosts, tmp_path: Path) -> None:
    options = ("--seconds", "0.2", "--output", "two.toml")
    succeeded(on_hosts(2, "-m", "paceline", "probe", *options))
    machine = read_machine(tmp_path / "two.toml")
    # Both hosts have the name of this computer, so the file numbers them.
    assert [host.name for host in machine.hosts] == ["host0", "host1"]
    assert [device.host for device in machine.devices] == ["host0", "host0", "host1", "host1"]
    between = {link.between: link for link in machine.links}
    assert list(between) == [("host0", "host0"), ("host1", "host1"), ("host0", "host1")]
    assert [link.uses_cores for link in between.values()] == [True, True, False]
    assert all(1e6 < link.bandwidth_bytes_per_s < 1e12 for link in between.values())


def test_elastic_workers_of_two_hosts_train_together(on_hosts: OnHosts, tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    shutil.copy(TESTS / "small_recipes.py", tmp_path)
    succeeded(on_hosts(1, str(PROGRAMS / "elastic_host.py")))  # each quorum needs both workers
    assert list((tmp_path / "runs0").glob("*/model.safetensors"))


def weights(home: Path) -> dict[str, torch.Tensor]:
    (folder,) = (home / "runs").iterdir()
    return load_file(folder / "model.safetensors")


def test_cutting_off_a_worker_for_20_s_does_not_change_the_model(
    on_hosts: OnHosts, tmp_path: Path
) -> None:
    paceline = [sys.executable, "-m", "paceline"]
    keys = tmp_path / "keys"
    assert Started([*paceline, "keys", str(keys)], tmp_path).finish().code == 0
    finished = succeeded(on_hosts(1, str(PROGRAMS / "cut_off.py"), str(keys), str(CUT_S)))
    sent = json.loads(finished[1].out)
    assert sent["after"] > 2 * sent["before"]  # it was cut off in mid-training
    home = tmp_path / "uncut"
    home.mkdir()
    alone = ["--workers", "1", "--strategy-option", "lanes=1", "--strategy-option", "staleness=0"]
    uncut = [*paceline, "train", "lenet5", "--strategy", "wheel", "--profile-s", "0", *alone]
    uncut += ["--epochs", "6"]
    assert Started(uncut, home).finish().code == 0
    own, other = weights(tmp_path), weights(home)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
