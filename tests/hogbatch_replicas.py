"""Replicas of hogbatch's workers in this process, with a recipe, a network and samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.machine import DeviceKind
from paceline.exchange.step import OF_CLASSES, Learning
from paceline.links.devices import Device
from paceline.links.shared_memory import SharedTensors
from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.gpu_replica import GpuReplica
from paceline.strategies.hogbatch.replica import CpuReplica, tensors_of
from paceline.training.data.dataset import TensorSamples
from paceline.training.recipes.losses import class_loss
from paceline.training.recipes.optimizers import OptimizerFactory
from paceline.training.recipes.recipe import Recipe


@contextmanager
def on_threads(
    recipe: Recipe,
    make: OptimizerFactory,
    learning: Learning | None = None,
    worker: int = 0,
    **options: Any,
) -> Iterator[tuple[CpuReplica, dict[str, Tensor]]]:
    """Open a worker's replica, and the tensors of the shared model."""
    memory = SharedTensors.of(tensors_of(recipe.model()), "a model")
    learning = learning or Learning(recipe.loss, name=recipe.name)
    spec = WorkerSpec(DeviceKind.CPU, **options)
    yield CpuReplica(recipe, memory.tensors, make, learning, worker, spec), memory.tensors
    memory.close()


@contextmanager
def on_gpu(
    recipe: Recipe,
    make: OptimizerFactory,
    device: Device,
    learning: Learning = OF_CLASSES,
    depth: int = 3,
) -> Iterator[tuple[GpuReplica, SharedTensors]]:
    """Open a GPU's replica, and the memory of the shared model."""
    memory = SharedTensors.of(tensors_of(recipe.model()), "a model")
    memory.close()
    unpin = device.pin(memory.memory)
    yield GpuReplica(recipe, memory, make, learning, 0, device, depth), memory
    unpin()


def classifying(build: Callable[[], nn.Module], data: tuple[Tensor, Tensor]) -> Recipe:
    """Return a classification recipe with samples in memory."""
    return Recipe(model=build, train=TensorSamples(*data), loss=class_loss, name="classifier")


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def samples(dtype: torch.dtype = torch.float32, count: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 6, generator=generator, dtype=dtype)
    return inputs[:count], torch.randint(4, (40,), generator=generator)[:count]
