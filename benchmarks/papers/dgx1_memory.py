"""Predict MXNet's training memory in Mojumder et al. 2018, section V-D and table IV.

The planner counts the tensors that PyTorch keeps for backward. MXNet differs in three known ways,
none of them inferred from the predicted cells of table IV:

- An activation's backward reads its input and its output, so the output cannot overwrite the input
  (until MXNet pull request 10847 of May 2018; the paper's container is from April).
- Only GPU 0 updates weights (sections II-B and V-D): it keeps the server's weights, the sum of all
  gradients and the momentum. The other GPUs keep none of these.
- The LeNet is MXNet's own example: it has two fully-connected layers (table I) and images of
  224x224 (section IV-C). The ResNet's images also have MXNet's usual 224x224.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.core.workload import Workload, replica_nbytes
from paceline.training.models import find
from paceline.training.models.describe import describe
from papers.paper_tables import read_printed

GB = 1e9
SMALLEST_BATCH = 16
_SERVED = 3  # copies of the weights' size on GPU 0: server's weights, gradient sum, momentum
_ACTIVATIONS = (functional.relu, torch.relu, torch.tanh)


def lenet() -> nn.Sequential:
    """Build MXNet's LeNet example for images of 224x224: 70,753,070 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 20, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.Tanh(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(50 * 53 * 53, 500), nn.Tanh(), nn.Linear(500, 1000)),
    )


# Builder of each network, and the width of its images.
_TRAINED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LeNet": (lenet, 224),
    "AlexNet": (lambda: find("alexnet").build(None), 227),
    "GoogLeNet": (lambda: find("googlenet").build(None), 224),
    "Inception-v3": (lambda: find("inception-v3").build(None), 299),
    "ResNet": (lambda: find("resnet50").build(None), 224),
}


class _Activation(torch.autograd.Function):
    """A ReLU that keeps its input and output; it replaces tanh, too, which keeps as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clamp_min(0.0)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(gradients[0], x, 0.0)


class KeepsInputs(TorchFunctionMode):
    """A mode in which activations also keep their inputs for backward, as in MXNet 1.1."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ACTIVATIONS:
            return _Activation.apply(args[0])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


@cache
def workload(network: str, batch_size: int) -> Workload:
    """Describe a GPU's step, with the activations that MXNet keeps for backward."""
    build, width = _TRAINED[network]
    with torch.device("meta"):
        model, images = build(), torch.empty(batch_size, 3, width, width)
    with KeepsInputs():
        return describe(model, images, network)


@cache
def memory_gb(network: str, batch_size: int, which: str = "GPU0") -> float:
    """Return the training memory in GB of GPU 0 or of another GPU ("GPUx").

    It is the printed memory before training with batches of 16 (context, libraries and weights),
    plus a replica's gradients, activations and batch, plus GPU 0's copies for updates.
    """
    work = workload(network, batch_size)
    served = _SERVED * work.gradient_nbytes if which == "GPU0" else 0
    own = replica_nbytes(work) - 2 * work.gradient_nbytes  # weights are in `before_gb`; no momentum
    return float(read_printed("dgx1")["before_gb"][network][0] + (own + served) / GB)


def largest_batch(network: str, capacity_nbytes: float) -> int:
    """Return the largest power-of-two batch size, at least 16, that fits into GPU 0."""
    batch_size = SMALLEST_BATCH
    while memory_gb(network, 2 * batch_size) * GB <= capacity_nbytes:
        batch_size *= 2
    return batch_size
