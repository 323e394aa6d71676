"""Trees of hubs with real processes: equal to plain SGD, planned bytes, and killed processes."""

import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from faults import failpoints
from hubs import address_of, result_of, until

sys.path.append(str(Path(__file__).parent / "programs"))

import turning

pytestmark = pytest.mark.slow

EPOCHS, STEPS = 3, 30  # STEPS: in an epoch
ALONE = ("--workers", "1", "--strategy-option", "lanes=1", "--strategy-option", "staleness=0")
ROOT = (
    *("-m", "paceline", "hub", "turning:Small", "--strategy-option", "head=fc1"),
    *("--strategy-option", f"seed={turning.SEED}", "--momentum", "0.5"),
    *("--profile-s", "0", "--batch-size", str(turning.BATCH), "--json"),
)
CHILD = ("-m", "paceline", "hub", "--json")
ANY = "tcp://127.0.0.1:0"


@pytest.fixture(autouse=True)
def model(tmp_path: Path) -> Iterator[None]:
    """Copy the model, and compute with one thread, as workers do: sums depend on their number."""
    shutil.copy(turning.__file__, tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(tmp_path: Path, result: dict) -> dict[str, torch.Tensor]:
    return load_file(tmp_path / "runs" / result["id"] / "model.safetensors")


def test_one_child_with_one_worker_trains_as_plain_sgd(start, worker_of, tmp_path: Path):
    root = start(*ROOT, *ALONE, "--epochs", str(EPOCHS), "--listen", ANY)
    child = start(*CHILD, *ALONE, "--parent", address_of(root), "--listen", ANY)
    worker = worker_of(address_of(child), "--worker-ids", "0")
    result, below = result_of(root), result_of(child)
    assert worker.finish().code == 0
    own, (other, losses) = model_of(tmp_path, result), turning.in_one_piece(EPOCHS)
    same = {name: torch.equal(own[name], values) for name, values in other.items()}
    assert all(same.values()), same
    assert [epoch["train_loss"] for epoch in result["epochs"]] == pytest.approx(losses)
    steps = EPOCHS * STEPS
    stale = [one["updates"]["staleness"]["all workers"] for one in (result, below)]
    assert stale == [{"0": steps}, {"0": steps}]
    assert (result["updates"]["count"], below["num_pushed"]) == (steps, steps)
    assert below["updates"]["by_worker"] == {"worker0": steps}
    for row in (*result["traffic"], *below["traffic"], *below["parent_traffic"]):
        assert row["nbytes"] == row["planned_nbytes"], row
    between = {row["purpose"]: row["nbytes"] for row in result["traffic"] if row["nbytes"]}
    whole = 8 * sum(values.numel() for n, values in other.items() if n.endswith(("weight", "bias")))
    assert {name[:5] for name in between} == {"hubs_"}
    assert sum(between.values()) == (2 * steps + 1) * whole
    assert sum(below["parent_wire_nbytes"]) > sum(between.values())


def test_a_killed_root_and_its_child_resume_from_the_checkpoint(start, worker_of, tmp_path: Path):
    kept = ("--epochs", str(EPOCHS), "--checkpoint-every", "0.05s")
    with failpoints({"at": "checkpoint.written", "do": "SIGKILL"}):
        root = start(*ROOT, *ALONE, *kept, "--listen", ANY)
    address = address_of(root)
    child = start(*CHILD, *ALONE, "--parent", address, "--listen", ANY)
    worker = worker_of(address_of(child), "--worker-ids", "0")
    root.process.wait()
    (folder,) = (tmp_path / "runs").iterdir()
    again = start(*ROOT, *ALONE, *kept, "--listen", address, "--resume", str(folder))
    result = result_of(again)
    assert [one.finish().code for one in (child, worker)] == [0, 0]
    own, (other, _) = model_of(tmp_path, result), turning.in_one_piece(EPOCHS)
    # A repeated step updates running means twice, so compare the parameters only.
    same = {n: torch.equal(own[n], v) for n, v in other.items() if n.endswith(("weight", "bias"))}
    assert all(same.values()), same
    assert result["updates"]["count"] == EPOCHS * STEPS


def test_a_tree_trains_without_a_killed_child_and_with_it_after_a_restart(start, worker_of):
    root = start(*ROOT, "--epochs", "1000", "--learning-rate", "0.02", "--listen", ANY)
    address = address_of(root)
    joining = ("--timeout", "5", "--parent")
    zero, one = (f"{address}?gather=3&worker={number}" for number in (0, 1))
    with failpoints({"at": "hub.updated", "visit": 30, "do": "SIGKILL"}):
        killed = start(*CHILD, *joining, zero, "--listen", ANY)
    other = start(*CHILD, *joining, one, "--listen", ANY)
    addresses = [address_of(child) for child in (killed, other)]
    workers = [worker_of(one) for one in addresses]
    killed.process.wait()
    assert until(root, "worker 0 ")
    until(root, "epoch ")  # the other child continues
    back = start(*CHILD, *joining, zero, "--listen", addresses[0])
    assert "with the others" in until(root, "worker 0 ")
    until(root, "epoch ")
    learnt = re.search(r"accuracy ([0-9.]+)%", until(root, "epoch "))
    assert float(learnt[1]) > 80
    root.process.send_signal(signal.SIGKILL)
    for child in (other, back):
        done = child.finish()
        assert done.code == 1
        assert "Traceback" not in done.err
        assert address in done.err.splitlines()[-1]
    assert [worker.finish().code for worker in workers] == [2, 2]
