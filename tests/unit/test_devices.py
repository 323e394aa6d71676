"""The devices of a process, and errors if they are not usable."""

import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.links import devices
from paceline.links.devices import cuda, device_named, first_device, gpus, num_gpus
from paceline.links.devices.cuda import CudaDevice
from paceline.links.rendezvous import check_gpus, device_of_rank
from refusals import refused

SRC = Path(devices.__file__).parents[1]
SIMULATED = torch.device("simulated", 0)
TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). "
    "(Triggered internally at ../c10/cuda/CUDAFunctions.cpp:109.)"
)


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    """Unset the variables of visible GPUs, simulated GPUs and ranks."""
    ranks = ("LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE")
    for name in ("CUDA_VISIBLE_DEVICES", "PACELINE_SIMULATED_GPUS", *ranks):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch, tmp_path) -> SimpleNamespace:
    """A machine with GPUs, `count` of which torch can use; torch warns with `warned`."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    found = SimpleNamespace(count=0, warned=None)

    def is_available() -> bool:
        if found.warned is not None:
            warnings.warn(found.warned, stacklevel=1)
        return found.count > 0

    monkeypatch.setattr(cuda, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.count)
    return found


def test_gpus_that_torch_cannot_use_are_refused(machine, monkeypatch):
    machine.warned = TOO_OLD
    with refused("device") as caught:
        gpus()
    assert "driver on your system is too old (found" in caught.value.problem
    assert "Triggered" not in caught.value.problem
    assert "CUDA_VISIBLE_DEVICES=" in caught.value.hint
    machine.warned = None
    for built_with in ("12.8", None):
        monkeypatch.setattr(torch.version, "cuda", built_with)
        for asked in (gpus, num_gpus, first_device, device_of_rank):
            with refused("device"):
                asked()


@pytest.mark.parametrize("hidden", [None, "", "-1"])
def test_without_gpus_or_if_they_are_hidden_there_is_the_cpu(machine, monkeypatch, hidden):
    if hidden is None:
        monkeypatch.setattr(cuda, "_DEVICE_FILES", Path("none"))
    else:
        machine.warned = TOO_OLD
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert (gpus(), num_gpus(), first_device()) == ((), 0, torch.device("cpu"))
    check_gpus(64)


def test_usable_gpus_are_found_and_counted(machine):
    machine.count = 2
    two = (torch.device("cuda", 0), torch.device("cuda", 1))
    assert (gpus(), num_gpus(), first_device()) == (two, 2, two[0])


def test_a_launcher_counts_gpus_by_the_driver_alone(machine, monkeypatch):
    """torch's `is_available` initialises CUDA, after which a process must not fork."""
    machine.count = 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("initialises CUDA"))
    check_gpus(2)
    with refused("workers"):
        check_gpus(3)


def test_each_rank_of_a_machine_has_its_own_gpu(machine, monkeypatch):
    machine.count = 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of_rank() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with refused("workers"):
        device_of_rank()


def test_devices_are_named_as_torch_does():
    assert device_named("cpu") == torch.device("cpu")
    assert device_named("simulated:0") == SIMULATED
    for name in ("cuda:0", "gpu", "simulated:9", "meta"):
        with refused("device"):
            device_named(name)


@pytest.mark.parametrize("pins", ["memory", "a new tensor"])
def test_too_little_pinned_memory_is_refused(monkeypatch, pins):
    def fails(*_: object, **how: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda on: entered.append(on) or nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=fails))
    device, values = CudaDevice(torch.device("cuda", 1)), torch.zeros(1000)
    if pins == "a new tensor":
        monkeypatch.setattr(torch, "empty_like", fails)
    with refused("device") as caught:
        device.pin(values) if pins == "memory" else device.pinned_like(values)
    for fact in ("4,000 bytes", "cuda:1", "CUDA error: out of memory"):
        assert fact in caught.value.problem
    assert entered == [torch.device("cuda", 1)]


WHEEL = ("--strategy", "wheel", "--strategy-option", "lanes=2")


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "lenet5", "--workers", "2"),
        ("train", "lenet5", "--workers", "4", *WHEEL),
        ("plan", "lenet5", "--workers", "2"),
        ("profile", "lenet5", "--workers", "2"),
        ("probe", "--workers", "2"),
        ("scale", "lenet5", "--workers", "1,2", "--batch-size", "8"),
    ],
    ids=" ".join,
)
def test_fewer_gpus_than_workers_are_refused_before_any_is_started(line, monkeypatch, arguments):
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "1")
    for module in ("launch", "processes"):
        monkeypatch.setattr(
            f"paceline.links.{module}.start", lambda *_, **how: pytest.fail("a worker was started")
        )
    before = set(Path().iterdir())
    assert line(*arguments).refused == "workers"
    assert set(Path().iterdir()) == before


ALLOWED = ("devices/", "studies/profile/operators.py")  # reads a name in torch's profile


def test_nothing_else_asks_torch_about_cuda():
    asks = re.compile(r"torch\.cuda|is_cuda|[\"']cuda[:\"']")
    found = [
        f"{path.relative_to(SRC)}:{number}: {text.strip()}"
        for path in sorted(SRC.rglob("*.py"))
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if asks.search(text) and not str(path.relative_to(SRC)).startswith(ALLOWED)
    ]
    assert found == []
