"""Commands and ranks on simulated GPUs, with results labelled as simulated."""

import json
import os
import random
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Cast, Codec
from paceline.codecs.names import find_codec
from paceline.core.errors import InvalidInput
from paceline.exchange import compressed
from paceline.exchange.compressed import CodecAllReduce
from paceline.links.devices import device_of, first_device
from paceline.links.rendezvous import joined, process_group
from paceline.record.trace import read_trace
from paceline.records.machine_file import read_machine
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.run import replica
from replicas import Net, build, check, train
from simulated_gpu.tensors import devices

NAME = "simulated on the host's memory"
PIECE = 1 << 10
LENGTHS = (3, 2 * PIECE + 17)
DEADLINE_S = 60.0
CPU, GPU = torch.device("cpu"), devices(2)[0].torch_device  # registered before any backward pass


def made(name: str) -> Codec:
    return Cast("float32") if name == "float32" else find_codec(name)


def summed(all_reduce: CodecAllReduce, name: str, rank: int) -> list[Tensor]:
    """Return the means of two steps, multiplied by 1 in the current stream."""
    on, found = all_reduce.device, []
    for step in range(2):
        all_reduce.begin_step()
        works = []
        for length in LENGTHS:
            generator = torch.Generator().manual_seed(1000 * rank + 10 * step + length)
            # The current stream may not have written the values yet.
            values = torch.randn(length, generator=generator).to(on).mul_(2.0).mul_(0.5)
            make = partial(made, name)
            works.append(all_reduce.begin(f"{name}/{length}", values, make, dist.get_world_size()))
            del values
        found += [work.future.wait() * 1.0 for work in works]
    return [one.cpu() for one in found]


def voided(all_reduce: CodecAllReduce, rank: int) -> list[bool]:
    """Return whether a non-finite value on one rank becomes NaN on all ranks."""
    found = []
    for name in ("dynamic8", "e3m0"):
        values = torch.ones(2000, device=all_reduce.device)
        if rank == 1:
            values[7] = torch.inf
        all_reduce.begin_step()
        work = all_reduce.begin("void", values, partial(made, name))
        found += [bool(work.future.wait().isnan().all()), work.num_nonfinite > 0]
    return found


def sums_of_both_devices() -> tuple[list[str], list[bool], list[float], float]:
    """Return codecs whose sums on the device and host differ, and results of other calls."""
    device = devices(1)[0]
    small = mock.patch.object(compressed, "PIECE", PIECE)
    with small, process_group(DEADLINE_S, CPU) as group:
        generator = random.Random(group.rank)
        device.delays = lambda stream, what: generator.choice([0.0, 0.0, 0.0, 2e-4, 1e-3])
        members = range(group.world_size)
        here, there = (CodecAllReduce("half", members, on, DEADLINE_S) for on in (CPU, GPU))
        differing = []
        for name in ("float32", "dynamic8", "e3m0", "onebit"):
            pair = (summed(one, name, group.rank) for one in (here, there))
            differing += [name for one, other in zip(*pair, strict=True) if not one.equal(other)]
        void, agreed = voided(there, group.rank), there.agree([float(group.rank), 2.0])
        deadline_s = joined(GPU).deadline_s
        here.close()
        there.close()
        device.synchronize()
    return differing, void, list(agreed), deadline_s


def test_encoded_sums_on_a_device_are_those_of_the_host(pair_on_gpus):
    """Both threads have their own streams; a race with each other or the caller is an error."""
    for found in pair_on_gpus(sums_of_both_devices, group=False):
        assert found == ([], [True] * 4, [1.0, 2.0], DEADLINE_S)


def train_beside_one_process() -> str:
    """Train with strategy allreduce, compare with one process, and return this rank's device."""
    with process_group(DEADLINE_S) as group:
        module, alone = build(Net)
        parallel = replica(module, AllReduce(workers=group.world_size), group)
        train(parallel, alone, range(4))
        check(module, alone)
        parallel.close()
        device_of(group.device).synchronize()
        return str(group.device)


def test_ranks_on_gpus_train_as_one_process_does(pair_on_gpus):
    found = pair_on_gpus(train_beside_one_process, group=False)
    assert found == ["simulated:0", "simulated:1"]


def refusal_of_a_mixed_group(way: str) -> str:
    """Form a group of a CPU and a GPU, as on two machines; return the field of the error."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ["PACELINE_SIMULATED_GPUS"] = os.environ["RANK"]
    try:
        if way == "process_group":
            with process_group(DEADLINE_S):
                return "none"
        if way == "initialised":
            dist.init_process_group("gloo")
        joined(first_device(), DEADLINE_S)
    except InvalidInput as error:
        return error.field
    return "none"


@pytest.mark.parametrize("way", ["process_group", "joined", "initialised"])
def test_ranks_on_devices_of_different_kinds_are_refused(pair_on_gpus, way):
    assert pair_on_gpus(refusal_of_a_mixed_group, way, group=False) == ["workers"] * 2


@pytest.fixture
def done(monkeypatch, paceline):
    """Run a command on simulated GPUs; return its result."""

    def run(*arguments: str, gpus: int = 1) -> dict:
        monkeypatch.setenv("PACELINE_SIMULATED_GPUS", str(gpus))
        found = paceline(*arguments, "--json")
        assert found.code == 0, found.err
        return json.loads(found.out)

    return run


LENET = ("train", "lenet5", "--profile-s", "0.2")


@pytest.mark.slow
def test_ranks_with_host_learn_and_copy_on_their_own_lanes(done, tmp_path):
    how = ("--strategy", "host", "--workers", "2", "--epochs", "2")
    result = done(*LENET, *how, gpus=2)
    assert result["machine"]["device"] == NAME
    assert result["accuracy"] > 0.85
    measured = read_trace(tmp_path / "runs" / result["id"] / "trace.json")["measured"]
    lanes = {(resource.owner, resource.lane.value) for resource in measured.tracks}
    assert {(f"gpu{rank}", lane) for rank in (0, 1) for lane in ("d2h", "h2d")} <= lanes
    assert {owner for owner, lane in lanes if lane == "compute"} == {"gpu0", "gpu1"}


@pytest.mark.slow
def test_bodies_on_a_gpu_and_their_hub_conform_to_their_plan(done):
    """Two lanes share a device, so their copies run one after another."""
    result = done(*LENET, "--strategy", "wheel", "--workers", "2", "--epochs", "1")
    assert (result["machine"]["device"], result["faults"]) == (f"cpu, {NAME}", [])
    assert result["lost"] == []


@pytest.mark.slow
def test_a_head_on_a_gpu_trains_equally_with_a_server_in_host_memory(done):
    """Use one worker, with which training is deterministic; copies must match the plan."""
    how = ("--strategy", "wheel", "--workers", "1", "--strategy-option", "lanes=1", "--epochs", "2")
    on_device, in_memory = (
        done(*LENET, *how, *lent, gpus=2)
        for lent in ((), ("--strategy-option", "server_memory=host"))
    )
    assert in_memory["faults"] == on_device["faults"] == []
    assert in_memory["machine"]["device"] == NAME
    losses = [
        [(epoch["train_loss"], epoch["test_loss"]) for epoch in run["epochs"]]
        for run in (on_device, in_memory)
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_profile_and_probe_use_the_gpu_and_rehearse_uses_the_cpu(done, tmp_path):
    result = done("profile", "lenet5", "--steps", "4", "--workers", "1")
    assert result["machine"]["device"] == NAME
    done("probe", "--seconds", "0.5", "--output", "simulated.toml")
    machine = read_machine(tmp_path / "simulated.toml")
    (device,), (link,) = machine.devices, machine.links
    assert (device.name, device.kind) == ("gpu0", "gpu")
    assert link.between[0] == "gpu0"
    assert all(NAME in one.source for one in (device, link))
    how = ("--device", "p100", "--workers", "2", "--steps", "3", "--strategy", "allreduce")
    result = done("rehearse", "lenet5", *how)
    assert (result["machine"]["device"], result["faults"]) == ("cpu", [])
