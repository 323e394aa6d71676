"""What layers keep for backward, as `describe` finds it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.core.workload import Workload, feature_nbytes
from paceline.models import describe
from paceline.models.inception import GoogLeNet
from paceline.models.networks import CifarResNet


def kept(workload: Workload) -> list[int | None]:
    return [layer.kept_nbytes for layer in workload.layers]


def saved_nbytes(model: nn.Module, batch: Tensor) -> int:
    """Return the bytes that autograd saves, but for parameters and the batch."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), batch)}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            saved[address] = tensor.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(batch)
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del output
    return nbytes


def test_a_pooled_convolution_keeps_its_whole_output_and_the_indices() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 5),
    )
    workload = describe(model, torch.zeros(2, 3, 8, 8))
    pooled = 2 * 8 * 4 * 4
    conv = 2 * 8 * 8 * 8 * 4 + pooled * (4 + 8)  # values, pooled values, indices of 8 bytes
    assert kept(workload) == [conv, 0]  # nothing reads the scores
    assert workload.layers[0].activation_nbytes == pooled * 4


def test_what_is_done_in_place_keeps_one_tensor_and_else_two() -> None:
    def of(activation: nn.Module) -> int | None:
        model = nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 2))
        return kept(describe(model, torch.zeros(5, 4)))[0]

    # Backward of a ReLU reads its result; what the layer in front of it made is not needed.
    assert of(nn.ReLU(inplace=True)) == of(nn.ReLU()) == 5 * 6 * 4
    # Of a SiLU it reads the input, and the next layer reads the result.
    assert of(nn.SiLU()) == 2 * 5 * 6 * 4


@pytest.mark.parametrize(
    ("model", "shape"),
    [(CifarResNet(1), (2, 3, 32, 32)), (GoogLeNet(10), (1, 3, 64, 64))],
    ids=["resnet8", "googlenet"],
)
def test_layers_together_keep_what_autograd_saves(model: nn.Module, shape: tuple[int]) -> None:
    batch = torch.zeros(shape)
    workload = describe(model, batch)
    found = sum(nbytes or 0 for nbytes in kept(workload))
    assert found == pytest.approx(saved_nbytes(model, batch), rel=0.02)


def test_features_are_what_is_kept_and_one_layer_s_work() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 2))
    workload = describe(model, torch.zeros(5, 4))
    hidden, scores = 5 * 6 * 4, 5 * 2 * 4
    assert [layer.activation_nbytes for layer in workload.layers] == [hidden, scores]
    # Backward of the last layer has the scores, their gradient, and that of its input.
    assert workload.layers[1].working_nbytes == hidden + 2 * scores
    assert feature_nbytes(workload.layers) == 2 * hidden + hidden + 2 * scores


def test_unknown_work_is_that_of_the_largest_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 2))
    layers = describe(model, torch.zeros(5, 4)).layers
    unknown = [replace(layer, working_nbytes=None) for layer in layers]
    assert feature_nbytes(unknown) == 2 * 5 * 6 * 4 + 5 * 6 * 4 + 5 * 2 * 4
