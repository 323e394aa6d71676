"""The commands of the launcher guides train a small model on two hosts."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from hosts import TwoHosts
from wire import ADDRESSES

from processes import DEADLINE_S, ENVIRONMENT

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


# The launchers set torch's variables themselves.
UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_both_train(hosts: TwoHosts, folder: Path, *scripts: str, **variables: str) -> None:
    """Run a bash script with these variables on each host, which must train as one of two workers.

    `$HOST` is the number of the host in the scripts. The first host writes the result.
    """
    for number, script in enumerate(scripts):
        (folder / str(number)).mkdir()
        (folder / str(number) / "launch.sh").write_text(f"export HOST={number}\n{script}")
    own = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = ENVIRONMENT | {"PATH": own} | variables
    command = ["bash", "-c", f"cd $RANK && unset {' '.join(UNSET)} && exec bash launch.sh"]
    finished = hosts.run(command, environment=environment, cwd=folder, deadline_s=DEADLINE_S)
    assert [one.code for one in finished] == [0, 0], finished
    (path,) = folder.glob("0/runs/*/result.json")
    result = json.loads(path.read_text())
    assert (result["settings"]["workers"], len(result["peak_memory_bytes"])) == (2, 2)
    assert result["settings"]["steps"] == 8


def test_the_commands_of_torchrun_train_on_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    text = shown("torchrun").replace("10.0.0.1", ADDRESSES[0])
    commands = re.findall(r"^torchrun .*$", text, re.MULTILINE)
    assert len(commands) == 2
    check_both_train(hosts, tmp_path, *commands)


def test_the_task_of_skypilot_trains_on_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    script = f"export SKYPILOT_NODE_RANK=$HOST\n{yaml.safe_load(shown('skypilot'))['run']}"
    known = {"SKYPILOT_NODE_IPS": "\n".join(ADDRESSES), "SKYPILOT_NUM_NODES": "2"}
    check_both_train(hosts, tmp_path, script, script, **known)


def test_a_train_job_trains_with_the_variables_of_its_controller(hosts, tmp_path):
    trainer = yaml.safe_load(shown("kubernetes"))["spec"]["trainer"]
    begin = trainer["args"].index("gpt2")
    command = [*trainer["command"], *trainer["args"][:begin], *TRAINING]
    known = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": ADDRESSES[0],
        "PET_MASTER_PORT": "29400",
    }
    script = f"export PET_NODE_RANK=$HOST\n{shlex.join(command)}"
    check_both_train(hosts, tmp_path, script, script, **known)
