"""Plans in half precision: what layers keep, what is exchanged, and how fast devices are."""

import pytest
import torch
from torch import nn

from paceline import forecast
from paceline.core.errors import InvalidInput
from paceline.core.workload import kept_nbytes
from paceline.models import describe
from paceline.planner.precision import in_half

BATCH = 32


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


def test_tensor_cores_make_a_step_faster_and_leave_the_exchange_as_it_is():
    whole, half = (
        forecast("resnet50", "8xv100", batch_size=512, precision=one)
        for one in ("float32", "bfloat16")
    )
    assert 2 < whole.step_s / half.step_s < 125 / 15.7
    assert half.wire_nbytes == whole.wire_nbytes
    (before, *_), (after, *_) = whole.memory_nbytes.values(), half.memory_nbytes.values()
    assert 0.5 < after / before < 0.6


def test_a_batch_that_fits_in_half_precision_only_is_refused_in_float32():
    asked = {"workers": 1, "batch_size": 256}
    with pytest.raises(InvalidInput, match=r"needs 21\.\d GB and has 16 GB"):
        forecast("resnet50", "8xv100", **asked)
    assert forecast("resnet50", "8xv100", precision="float16", **asked).samples_per_s > 0


def test_a_device_whose_speed_in_half_precision_nobody_says_is_refused():
    with pytest.raises(InvalidInput, match=r"half_flops_per_s of gpu0; add it, or say what one"):
        forecast("lenet5", "4xk80", precision="bfloat16")
    with pytest.raises(InvalidInput, match="precision: must be one of float32, bfloat16, float16"):
        forecast("lenet5", "4xk80", precision="int8")
