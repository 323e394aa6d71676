"""Tests on a real GPU: clocks of asynchronous work, and whole runs.

All are skipped on a machine without a GPU.
"""

import copy
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from paceline.core.plan import Kind
from paceline.core.wire_format import Kernel
from paceline.links import clock as clock_module
from paceline.links.clock import DeviceClock, clock_for
from paceline.record.trace import read_trace
from paceline.records.machine_file import read_machine
from paceline.strategies.wheel.server import LentHead
from paceline.training.models import describe, find

BESIDE_ONE_PROCESS = Path(__file__).parents[1] / "beside_one_process.py"
NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

CYCLES = 50_000_000  # of the GPU's clock: 25 to 50 ms


@pytest.fixture
def cuda() -> torch.device:
    """Return the first GPU, warmed up to its working clock rate."""
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    return torch.device("cuda", 0)


@pytest.mark.parametrize("anchor_every_s", [clock_module._ANCHOR_EVERY_S, 0.0])
def test_marks_are_reached_when_the_work_before_them_is_done(cuda, monkeypatch, anchor_every_s):
    monkeypatch.setattr(clock_module, "_ANCHOR_EVERY_S", anchor_every_s)
    clock = clock_for(cuda)
    assert isinstance(clock, DeviceClock)
    torch.cuda.synchronize()
    began = time.monotonic()
    first = clock.mark()
    torch.cuda._sleep(CYCLES)
    second = clock.mark()
    torch.cuda._sleep(2 * CYCLES)
    third = clock.mark()
    issued = time.monotonic()
    start, middle, end = clock.seconds([first, second, third])
    ended = time.monotonic()
    assert issued - began < (ended - began) / 2  # the host has not waited for the GPU
    assert began - 1e-3 < start < middle < end < ended + 1e-3
    assert (end - middle) / (middle - start) == pytest.approx(2, rel=0.25)
    # The host's clock agrees, because nearly all of the time was sleep.
    assert end - start == pytest.approx(ended - began, rel=0.2)


@pytest.mark.parametrize("name", ["lenet5", "resnet18"])
def test_a_description_does_not_depend_on_the_device_and_takes_nothing_of_it(cuda, name: str):
    architecture = find(name)
    torch.manual_seed(0)
    model, inputs = architecture.build(None), torch.zeros(2, *architecture.input_shape)
    on_cpu = describe(model, inputs, name)
    model, inputs = model.to(cuda), inputs.to(cuda)
    state, allocated = torch.cuda.get_rng_state(cuda), torch.cuda.memory_allocated(cuda)
    on_gpu = describe(model, inputs, name)
    for one, other in zip(on_gpu.layers, on_cpu.layers, strict=True):
        assert asdict(one) == asdict(other), one.name
    assert on_gpu == on_cpu
    assert torch.equal(torch.cuda.get_rng_state(cuda), state)
    assert torch.cuda.memory_allocated(cuda) == allocated


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    """Remove the environment variables of a rank."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def trained(paceline, *arguments: str) -> dict:
    done = paceline("train", "lenet5", "--json", "--profile-s", "0.5", *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_run_on_one_gpu_learns_and_conforms_to_its_plan(paceline, tmp_path):
    result = trained(paceline, "--workers", "1", "--epochs", "8", "--learning-rate", "0.1")
    assert result["machine"]["device"] == torch.cuda.get_device_name(0)
    assert result["accuracy"] > 0.9
    assert result["faults"] == []
    measured = read_trace(tmp_path / "runs" / result["id"] / "trace.json")["measured"]
    assert {resource.owner for resource in measured.tracks} == {"gpu0"}
    assert measured.num_steps() == 20


def test_a_gpu_takes_the_same_steps_as_a_cpu(paceline, monkeypatch):
    arguments = ("--workers", "1", "--epochs", "2")
    on_gpu = trained(paceline, *arguments)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_cpu = trained(paceline, *arguments)
    assert on_cpu["machine"]["device"] == "cpu"
    for one, other in zip(on_gpu["epochs"], on_cpu["epochs"], strict=True):
        # On a GPU, convolutions may round their factors to ten bits (TF32).
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=0.05)
        assert one["score"] == pytest.approx(other["score"], abs=0.05)


def test_the_gpu_has_the_parameters_of_an_answer_and_nothing_afterwards() -> None:
    device = torch.device("cuda")
    kept = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 10))
    own = copy.deepcopy(kept)
    lent = LentHead(own, own, kept, device)
    inputs = torch.randn(64, 512)
    before = None  # read after the first product, because cuBLAS keeps its workspace
    for _ in range(3):
        lent.fill()
        lent.head(inputs.to(device)).sum().backward()
        found = lent.done([one.grad for one in lent.parameters if one.grad is not None])
        whole = sum(one.nbytes for one in kept.parameters())
        filled = torch.cuda.memory_allocated()
        lent.empty()
        before = torch.cuda.memory_allocated() if before is None else before
        assert torch.cuda.memory_allocated() == before
        assert filled - before >= 2 * whole
    kept(inputs).sum().backward()
    expected = [one.grad for one in kept.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_gpus_are_measured_with_their_links(paceline, tmp_path):
    done = paceline("probe", "--seconds", "1", "--output", "gpus.toml")
    assert done.code == 0, done.err
    machine = read_machine(tmp_path / "gpus.toml")
    (host,) = machine.hosts
    assert len(machine.devices) == torch.cuda.device_count()
    assert set(host.codecs) == set(get_args(Kernel))
    for index, device in enumerate(machine.devices):
        assert (device.name, device.kind) == (f"gpu{index}", "gpu")
        assert device.memory_bytes == torch.cuda.get_device_properties(index).total_memory
        assert 1e11 < device.flops_per_s < 1e16
        assert 1e10 < device.memory_bandwidth_bytes_per_s < 2e13
        (hop,) = machine.route(device, host)
        assert 1e8 < hop.link.bandwidth_bytes_per_s < 1e12
        assert 0 <= hop.link.latency_s < 1e-2


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "tolerance", "clip"),
    [
        (2, "float64", 1e-12, "clip"),
        (2, "float32", 1e-4, "as it is"),
        (3, "float64", 1e-12, "as it is"),
        (3, "float32", 1e-4, "clip"),
    ],
)
def test_ranks_on_gpus_train_as_one_process_does(start, num_ranks, dtype, tolerance, clip):
    ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    done = start(*ranks, str(BESIDE_ONE_PROCESS), "host", dtype, clip).finish()
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert sorted(row["rank"] for row in rows) == list(range(num_ranks))
    assert max(row["error"] for row in rows) < tolerance
    assert len({tuple(row["bits"]) for row in rows}) == 1
    names = {name.partition("[")[0] for row in rows for name in row["spans"]}
    assert {"d2h", "reduce", "h2d"} <= names


def test_a_launcher_does_not_initialise_cuda():
    code = (
        "import torch; from paceline.links.rendezvous import check_gpus; check_gpus(1); "
        "assert not torch.cuda.is_initialized(); "
        "from paceline.links.devices.cuda import can_fork; assert can_fork()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(NUM_GPUS < 2, reason="there is no second CUDA device")
def test_a_run_on_two_gpus_conforms_to_its_plan(paceline, tmp_path):
    result = trained(paceline, "--workers", "2", "--epochs", "4")
    assert result["faults"] == []
    measured = read_trace(tmp_path / "runs" / result["id"] / "trace.json")["measured"]
    (reduction,) = (span for span in measured.spans if (span.step, span.kind) == (0, Kind.REDUCE))
    assert {resource.owner for resource in reduction.on} == {"gpu0", "gpu1"}
    alone = trained(paceline, "--workers", "1", "--epochs", "4")
    losses = [[row["train_loss"] for row in run["epochs"]] for run in (result, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
