"""`paceline.forecast` and `paceline.plan`, as a Python program calls them; half precision."""

import pytest
import torch
from torch import nn

import paceline
from command_line import MACHINE as EPYC
from paceline import forecast
from paceline.core.workload import kept_nbytes
from paceline.models import describe
from paceline.planner.precision import in_half
from refusals import refused

BATCH = 32
MACHINE = "two-hosts-gigabit"


@pytest.mark.parametrize("strategy", ["allreduce", "host", "tree", "local", "wheel"])
def test_it_is_what_the_plan_says_of_that_strategy(strategy: str):
    found = forecast("lenet5", MACHINE, strategy, batch_size=32, workers=2)
    ranking = paceline.plan("lenet5", MACHINE, 32, workers=2, strategy=strategy)
    (same,) = [one for one in ranking if one.codec is None and one.strategy == strategy]
    assert found.step_s == pytest.approx(same.step_s)
    assert found.config == same.config
    assert found.efficiency == pytest.approx(same.efficiency)


def test_options_are_those_of_the_configuration():
    plain = forecast("alexnet", MACHINE, "allreduce", batch_size=32)
    coded = forecast("alexnet", MACHINE, "allreduce", batch_size=32, options={"codec": "dynamic8"})
    assert (plain.codec, coded.codec) == (None, "dynamic8")
    assert sum(coded.link_nbytes.values()) < 0.26 * sum(plain.link_nbytes.values())


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"strategy": "nonsense"}, "strategy"),
        ({"strategy": "wheel", "balanced": True}, "balanced"),
        ({"options": {"nofield": 1}}, "strategy allreduce"),
        ({"options": {"workers": 2}}, "options"),
        ({"workers": 3}, "workers"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_what_cannot_be_planned_is_refused(asked: dict, field: str):
    with refused(field):
        forecast("lenet5", MACHINE, **asked)


def test_one_strategy_or_several():
    with refused("strategy, strategies"):
        paceline.plan("lenet5", MACHINE, strategy="host", strategies=["tree"])


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * 12 * 12, 10)), torch.randn(BATCH, 3, 16, 16)


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(1024, 8)), torch.randn(BATCH, 512)


def saved_nbytes(model: nn.Module, batch: torch.Tensor) -> int:
    """The bytes that autograd keeps of a step under autocast, but for parameters and the input."""
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


@pytest.mark.parametrize("make", [convolutions, perceptron])
def test_what_a_step_keeps_is_what_torchs_autocast_keeps(make):
    model, batch = make()
    own = describe(model, batch)
    found, expected = kept_nbytes(in_half(own).layers), saved_nbytes(model, batch)
    # Torch keeps the input in half precision, too, which is the batch's and not a layer's.
    assert found == pytest.approx(expected - batch.nbytes // 2, rel=0.1)
    assert in_half(own).gradient_nbytes == own.gradient_nbytes


def test_a_lone_device_reaches_what_it_was_measured_to_make_so():
    asked = {"batch_size": 128, "precision": "float16", "measured": "900/s"}
    alone = forecast("resnet50", "8xk80", workers=1, **asked)
    assert alone.samples_per_s == pytest.approx(900, rel=0.02)


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_tensor_cores_make_a_step_faster_and_leave_the_exchange_as_it_is(precision):
    whole, half = (
        forecast("resnet50", "8xv100", batch_size=512, precision=one)
        for one in ("float32", precision)
    )
    assert 2 < whole.step_s / half.step_s < 125 / 15.7
    assert half.wire_nbytes == whole.wire_nbytes
    (before, *_), (after, *_) = whole.memory_nbytes.values(), half.memory_nbytes.values()
    assert 0.5 < after / before < 0.6


def test_a_batch_that_fits_in_half_precision_only_is_refused_in_float32():
    asked = {"workers": 1, "batch_size": 256}
    with refused("memory"):
        forecast("resnet50", "8xv100", **asked)
    assert forecast("resnet50", "8xv100", precision="float16", **asked).samples_per_s > 0


def test_a_device_whose_speed_in_half_precision_nobody_says_is_refused():
    for precision in ("bfloat16", "int8"):
        with refused("precision"):
            forecast("lenet5", "4xk80", precision=precision)


def test_a_module_of_the_programs_own_is_planned_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    before = torch.get_rng_state()
    forecasts = paceline.plan(model, EPYC, batch_size=33, input_shape=(1, 8, 8))
    assert torch.equal(torch.get_rng_state(), before)
    rates = [one.samples_per_s for one in forecasts]
    assert rates == sorted(rates, reverse=True)
    plain = [one for one in forecasts if (one.strategy, one.codec) == ("allreduce", None)]
    by_workers = {one.workers: one for one in plain}
    num_parameters = 64 * 100 + 100 + 100 * 10 + 10
    assert by_workers[2].wire_nbytes == 2 * 4 * num_parameters
    # 33 samples are 17 and 16: the step takes as long as with 34, but 33 are done.
    assert by_workers[2].samples_per_s == pytest.approx(33 / by_workers[2].step_s)
    even = paceline.plan(model, EPYC, batch_size=34, input_shape=(1, 8, 8), workers=2)
    (of_even,) = (one for one in even if (one.strategy, one.codec) == ("allreduce", None))
    assert by_workers[2].step_s == of_even.step_s
    assert by_workers[1].samples_per_s == pytest.approx(33 / by_workers[1].step_s)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"input_shape": ()}, "input_shape"),
        ({"input_shape": (1, 0, 32)}, "input_shape"),
        ({"model": nn.Linear(3, 3)}, "input_shape"),
        ({"model": nn.ReLU(), "input_shape": (3,)}, "ReLU"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(arguments, field: str) -> None:
    with refused(field):
        paceline.plan(**{"model": "lenet5", "machine": EPYC} | arguments)
