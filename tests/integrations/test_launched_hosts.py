"""The commands of the launcher guides train a small model on two hosts."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from host import Host
from hosts import TwoHosts
from wire import ADDRESSES, INTERFACE

from processes import DEADLINE_S

pytestmark = pytest.mark.slow

TRAINING = (
    *("lenet5", "--data", "synthetic:1x32x32,classes=10,samples=640", "--batch-size", "32"),
    *("--steps", "8", "--profile-s", "0.2", "--timeout", "120", "--seed", "7"),
    *("--checkpoint-every", "never"),
)
GUIDES = Path(__file__).parents[2] / "docs" / "launch"


def shown(page: str) -> str:
    """Return a guide's first script, with one worker per host and a small model."""
    text = re.search(r"```(?:bash|yaml)\n(.*?)```", (GUIDES / f"{page}.md").read_text(), re.S)[1]
    text = re.sub(r"--nproc-per-node \d+", "--nproc-per-node 1", text)
    return re.sub(r"-m paceline train .*", f"-m paceline train {shlex.join(TRAINING)}", text)


def on_both(
    hosts: tuple[Host, ...], scripts: list[str], folders: list[Path], extra=({}, {})
) -> None:
    """Run a bash script on each host, and check that both succeed."""
    own = str(Path(sys.executable).parent)
    usual = os.environ | {
        "PATH": f"{own}:{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    started = []
    for host, script, folder, more in zip(hosts, scripts, folders, extra, strict=True):
        folder.mkdir()
        # A host has its own mounts, and its commands start in the root folder.
        there = f"cd '{folder}' && {script}"
        command = host.on_host("timeout", str(DEADLINE_S), "bash", "-c", there)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=usual | more, **pipes))
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)


def is_trained_by_two(folder: Path) -> None:
    (path,) = folder.glob("runs/*/result.json")
    result = json.loads(path.read_text())
    assert (result["settings"]["workers"], len(result["peak_memory_bytes"])) == (2, 2)
    assert result["settings"]["steps"] == 8


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / "first", tmp_path / "second"]


def test_the_commands_of_torchrun_train_on_two_hosts(hosts: TwoHosts, folders: list[Path]) -> None:
    text = shown("torchrun").replace("10.0.0.1", ADDRESSES[0])
    commands = re.findall(r"^torchrun .*$", text, re.MULTILINE)
    assert len(commands) == 2
    on_both(hosts.hosts, commands, folders)
    is_trained_by_two(folders[0])


def test_the_task_of_skypilot_trains_on_two_hosts(hosts: TwoHosts, folders: list[Path]) -> None:
    run = yaml.safe_load(shown("skypilot"))["run"]
    known = {"SKYPILOT_NODE_IPS": "\n".join(ADDRESSES), "SKYPILOT_NUM_NODES": "2"}
    ranks = [known | {"SKYPILOT_NODE_RANK": str(rank)} for rank in range(2)]
    on_both(hosts.hosts, [run, run], folders, ranks)
    is_trained_by_two(folders[0])


def test_a_train_job_trains_with_the_variables_of_its_controller(hosts, folders):
    trainer = yaml.safe_load(shown("kubernetes"))["spec"]["trainer"]
    begin = trainer["args"].index("gpt2")
    command = [*trainer["command"], *trainer["args"][:begin], *TRAINING]
    known = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": ADDRESSES[0],
        "PET_MASTER_PORT": "29400",
    }
    script = " ".join(f"'{word}'" for word in command)
    ranks = [known | {"PET_NODE_RANK": str(rank)} for rank in range(2)]
    on_both(hosts.hosts, [script, script], folders, ranks)
    is_trained_by_two(folders[0])
