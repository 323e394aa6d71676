"""The functions `paceline.forecast` and `paceline.plan`, also with named machines."""

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from command_line import MACHINE as EPYC
from paceline import forecast
from paceline.core.losses import Losses
from paceline.core.workload import kept_nbytes
from paceline.planner.device_speed import in_half
from paceline.records.catalogue import EqualDevices, by_name, known_link
from paceline.records.machine_file import find_machine, read_machine
from paceline.records.profile import ProfileSettings
from paceline.training.models import describe
from profiles import profile_result, write_profile
from refusals import refused

MACHINE = "two-hosts-gigabit"


@pytest.mark.parametrize("strategy", ["allreduce", "host", "local", "wheel"])
def test_a_forecast_equals_the_plan_of_its_strategy(strategy: str):
    ranking = paceline.plan("lenet5", MACHINE, 32, workers=2, strategy=strategy)
    (same,) = [one for one in ranking if one.codec is None and one.strategy == strategy]
    rounds = {"sync_every": same.config.sync_every} if strategy == "local" else None
    found = forecast("lenet5", MACHINE, strategy, batch_size=32, workers=2, options=rounds)
    assert found.step_s == pytest.approx(same.step_s)
    assert found.config == same.config
    assert found.efficiency == pytest.approx(same.efficiency)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"strategy": "nonsense"}, "strategy"),
        ({"precision": "int8"}, "precision"),
        ({"strategy": "wheel", "balanced": True}, "balanced"),
        ({"options": {"nofield": 1}}, "options"),
        ({"options": {"workers": 2}}, "options"),
        ({"workers": 3}, "workers"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 10**6}, "batch_size"),
        ({"machine": "4xk80", "precision": "bfloat16"}, "precision"),  # of unknown speed
        ({"input_shape": ()}, "input_shape"),
        ({"input_shape": (1, 0, 32)}, "input_shape"),
        ({"model": nn.Linear(3, 3)}, "input_shape"),
        ({"model": nn.ReLU(), "input_shape": (3,)}, "ReLU"),
        *(({"measured": text}, "measured") for text in ("350", "0/s", "1e999/s", "350/s@0")),
    ],
)
def test_what_cannot_be_planned_is_refused(asked: dict, field: str):
    with refused(field):
        forecast(**{"model": "lenet5", "machine": MACHINE} | asked)


def saved_nbytes(model: nn.Module, batch: torch.Tensor) -> int:
    """Return the bytes that autograd saves under autocast, without parameters and input."""
    kept: dict[int, int] = {}
    known = {one.untyped_storage().data_ptr() for one in (*model.parameters(), batch)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        outputs = model(batch)
    assert outputs.dtype == torch.bfloat16
    return sum(kept.values())


def test_kept_memory_in_half_precision_is_that_of_autocast():
    """Features, and copies of all parameters but those of the first layer, are of similar size."""
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU()]
    model, batch = nn.Sequential(*layers, nn.Linear(1024, 8)), torch.randn(512, 512)
    own = describe(model, batch)
    found, expected = kept_nbytes(in_half(own).layers), saved_nbytes(model, batch)
    # Torch also keeps a half-precision copy of the batch, which belongs to no layer.
    assert found == pytest.approx(expected - batch.nbytes // 2, rel=0.1)
    assert in_half(own).gradient_nbytes == own.gradient_nbytes


def test_one_device_reaches_its_measured_throughput_in_half_precision():
    asked = {"batch_size": 128, "precision": "float16", "measured": "900/s"}
    alone = forecast("resnet50", "8xk80", workers=1, **asked)
    assert alone.samples_per_s == pytest.approx(900, rel=0.02)


def test_tensor_cores_make_a_step_faster_and_leave_the_exchange_as_it_is():
    whole, half = (
        forecast("resnet50", "8xv100", batch_size=512, precision=one)
        for one in ("float32", "bfloat16")
    )
    assert 2 < whole.step_s / half.step_s < 125 / 15.7
    assert half.wire_nbytes == whole.wire_nbytes
    (before, *_), (after, *_) = whole.memory_nbytes.values(), half.memory_nbytes.values()
    assert 0.5 < after / before < 0.6


def test_a_module_is_planned() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    forecasts = paceline.plan(model, EPYC, batch_size=33, input_shape=(1, 8, 8))
    plain = [one for one in forecasts if (one.strategy, one.codec) == ("allreduce", None)]
    by_workers = {one.workers: one for one in plain}
    assert by_workers[2].wire_nbytes == 2 * 4 * (64 * 100 + 100 + 100 * 10 + 10)
    # 33 samples are 17 and 16: the step takes as long as with 34, but 33 are done.
    assert by_workers[2].samples_per_s == pytest.approx(33 / by_workers[2].step_s)
    even = forecast(model, EPYC, "allreduce", batch_size=34, input_shape=(1, 8, 8), workers=2)
    assert by_workers[2].step_s == even.step_s
    assert by_workers[1].samples_per_s == pytest.approx(33 / by_workers[1].step_s)


# Named machines of equal devices, and plans calibrated with one measured figure
NONE = Losses.none("a test")


def planned(machine, model="resnet18", **asked):  # type: ignore[no-untyped-def]
    return paceline.plan(model, machine, strategy="allreduce", **asked)


def test_the_figure_is_of_a_workers_own_batch_unless_it_says_which() -> None:
    machine = EqualDevices(device="v100", devices=2).machine("two", NONE)
    (alone,) = planned(machine, batch_size=16, workers=1, measured="350/s@16")
    usual = {one.workers: one for one in planned(machine, batch_size=16, measured="350/s")}
    assert usual[1].samples_per_s == pytest.approx(350.0)
    (as_parts,) = planned(machine, batch_size=32, workers=2, measured=".35e3/s")
    (stated,) = planned(machine, batch_size=32, workers=2, measured="350/s@16")
    assert alone.samples_per_s == pytest.approx(350.0)
    assert as_parts.samples_per_s == pytest.approx(stated.samples_per_s)
    (of_more,) = planned(machine, batch_size=32, workers=2, measured="350/s@4096")
    assert of_more.samples_per_s < stated.samples_per_s  # latencies matter less in a large batch


def test_a_batch_that_was_trained_is_not_refused_for_its_memory() -> None:
    # The measured run may have used less memory than predicted, such as with half precision.
    size = 8192
    (refusal,) = planned("8xk80", batch_size=size, workers=1).refused
    assert "GB" in refusal.why
    (found,) = planned("8xk80", batch_size=size, workers=1, measured="100/s")
    assert found.samples_per_s == pytest.approx(100.0, rel=1e-6)


def test_a_name_gives_hosts_devices_and_network() -> None:
    machine = find_machine("3x4xrtx-3090+100gbe")
    assert (machine.num_devices, len(machine.devices)) == (12, 4)
    part = machine.for_workers(12)
    assert len(part.hosts) == 3
    own = part.route(part.devices[0], part.devices[1])
    staged = known_link("pcie4-staged")
    one, shared = staged.bandwidth_bytes_per_s, staged.together_bytes_per_s
    assert [hop.link.bandwidth_bytes_per_s for hop in own] == [one, shared, one]
    far = part.route(part.devices[0], part.devices[-1])
    slowest = min(hop.link.bandwidth_bytes_per_s for hop in far)
    assert slowest == known_link("100gbe").bandwidth_bytes_per_s
    assert by_name("dgx1-v100") is None


def test_gradients_of_two_bytes_take_half_the_time_on_the_link_and_two_casts() -> None:
    machine = EqualDevices(device="p100-pcie", devices=2).machine("two", NONE)
    asked = {"batch_size": 2, "workers": 2, "options": {"bucket_mb": 4096, "codec": "half"}}
    found = {one.config.codec: one for one in planned(machine, model="vgg16", **asked)}
    whole, half = found[None], found["half"]
    # Two ranks encode each value once and decode it 1.5 times; each cast moves six bytes.
    casts_s = 2.5 * 6 * 138_357_544 / machine.devices[0].memory_bandwidth_bytes_per_s
    saved_s = whole.breakdown.communication_s / 2
    assert saved_s > 5 * casts_s
    # All casts but the first encoding and the last decoding may overlap with the link.
    assert whole.step_s - saved_s < half.step_s <= whole.step_s - saved_s + casts_s


def test_codecs_of_named_gpus_are_planned_only_on_request() -> None:
    (found,) = planned("2xp100", batch_size=64, workers=2)
    assert found.config.codec is None
    asked = {"batch_size": 64, "workers": 2, "options": {"codec": "dynamic8"}}
    (refusal,) = planned("2xp100", **asked).refused
    assert refusal.why.startswith("codec ")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("8xv101", "device"),
        ("2x8xv100", "machine"),
        ("2x8xv100+token-ring", "link"),
        ("0xv100", "machine"),
        ("100xv100", "machine"),
        ("dgx-v100", "machine"),
        ("elsewhere/8xv100.toml", "elsewhere/8xv100.toml"),
    ],
)
def test_unknown_machines_are_refused(name, field, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(field):
        find_machine(name)


def test_a_file_of_equal_devices_is_the_machine_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[equal]\ndevice = "v100"\ndevices = 8\n')
    assert read_machine(path).devices == find_machine("8xv100").devices
    path.write_text('name = "mine"\n[equal]\ndevice = "v100"\ndevices = 8\nlinks = "nvlink2"\n')
    with refused(path) as caught:
        read_machine(path)
    assert caught.value.problem.startswith("equal.links")


def test_a_missing_file_is_found_as_a_named_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("8xv100", "4x8xv100+25gbe", "4x4090", "dgx1-v100"):
        assert find_machine(f"{name}.toml") == find_machine(name)
    path = Path("8xv100.toml")
    path.write_text('name = "mine"\n[equal]\ndevice = "k80"\ndevices = 2\n')
    assert find_machine(str(path)).name == "mine"
    assert find_machine("8xv100").num_devices == 8


@pytest.mark.parametrize(("hosts", "samples_per_s"), [(1, 500.0), (2, 1000.0)])
def test_a_host_that_reads_too_few_samples_limits_its_own_devices(hosts, samples_per_s) -> None:
    network = None if hosts == 1 else "ib-hdr"
    equal = EqualDevices(device="v100", devices=4, hosts=hosts, network=network)
    machine = equal.machine("four", NONE)
    slow = machine.with_each("hosts", samples_per_s=500.0)
    (found,) = planned(slow, batch_size=256 * hosts, workers=4 * hosts, measured="350/s")
    assert found.samples_per_s == pytest.approx(samples_per_s)
    assert "500 samples/s" in found.notes[0]
    (alone,) = planned(slow, batch_size=64, workers=1, measured="350/s")
    assert alone.samples_per_s == pytest.approx(350.0)


def test_a_profile_of_one_device_calibrates_too(tmp_path: Path) -> None:
    settings = ProfileSettings(model="lenet5", batch_size=32)
    result = profile_result(settings=settings, workers=profile_result().workers[:1])
    write_profile(folder := tmp_path / "profiled", result)
    machine = EqualDevices(device="v100", devices=2).machine("two", NONE)
    (found,) = planned(machine, model="lenet5", batch_size=64, workers=2, measured=folder)
    assert found.breakdown.compute_s == pytest.approx(result.step.median_s, rel=0.02)
    with refused("measured"):
        planned("8xv100", model="alexnet", measured=str(folder))
