"""The commands of the guide "LoRA on two machines", with a local rank as each host."""

import os
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "lora.md").read_text()
SCRIPT = "finetune_lora_on_hosts.py"
MISSING = [name for name in ("transformers", "accelerate", "peft") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"without {MISSING}"),
    pytest.mark.timeout(300),
]


def commands(num_hosts: int) -> list[list[str]]:
    """Return the script's arguments for each host, by rank."""
    found = re.findall(rf"^\w\$ torchrun --nnodes {num_hosts} (.*)$", GUIDE, re.M)
    assert [one.split()[:2] for one in found] == [["--node-rank", str(i)] for i in range(num_hosts)]
    return [shlex.split(one.partition(SCRIPT)[2]) for one in found]


def as_host(folder: str, arguments: list[list[str]]) -> None:
    """Run the script in the host's folder, as the only process of the host."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    Path(folder, str(rank)).mkdir(exist_ok=True)
    os.chdir(Path(folder, str(rank)))
    sys.argv[1:] = arguments[rank]
    runpy.run_path(str(ROOT / "examples" / SCRIPT), run_name="__main__")


def adapters(folder: Path, step: int) -> list[torch.Tensor]:
    file = folder / "runs" / "lora" / f"checkpoint-{step}" / "adapter_model.safetensors"
    return list(load_file(file).values())


def test_unequal_hosts_and_a_third_host_end_with_the_same_adapters(
    pair: Any, triple: Any, tmp_path: Path
) -> None:
    pair(as_host, str(tmp_path), commands(2), group=False)
    copytree(tmp_path / "1", tmp_path / "2")  # scp
    triple(as_host, str(tmp_path), commands(3), group=False)
    for steps in ([400, 100], [800, 200, 200]):
        first, *others = [adapters(tmp_path / str(i), step) for i, step in enumerate(steps)]
        assert all(all(map(torch.equal, first, one)) for one in others)


def test_the_script_runs_alone(start: Any) -> None:
    (command,) = re.findall(rf"^alone\$ python {SCRIPT} (.*)$", GUIDE, re.M)
    done = start(str(ROOT / "examples" / SCRIPT), *shlex.split(command)).finish()
    assert done.code == 0, done.err
    assert "train_steps_per_second" in done.out
