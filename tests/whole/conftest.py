"""Fixtures for tests of whole commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import Finished, Started


@pytest.fixture
def outcome(paceline: Callable[..., Finished]) -> Callable[..., dict[str, Any]]:
    """Run a command with --json, and return its result."""

    def run(*arguments: str) -> dict[str, Any]:
        done = paceline(*arguments, "--json")
        assert done.code == 0, done.err
        result: dict[str, Any] = json.loads(done.out)
        return result

    return run


@pytest.fixture
def worker_of(start: Callable[..., Started]) -> Callable[..., Started]:
    """Start a CPU worker of strategy wheel that connects to a hub's address."""
    joining = ("-m", "paceline", "worker", "--threads", "1", "--device", "cpu", "--connect")
    return lambda address, *more: start(*joining, address, *more)


@pytest.fixture
def accuracy_of() -> Callable[[Path], float]:
    """Compute the test accuracy of a fresh LeNet-5 with saved weights."""
    from safetensors.torch import load_model

    from paceline.training.data import load
    from paceline.training.models.networks import LeNet5

    def accuracy(weights: Path) -> float:
        model, test = LeNet5(), load("digits", (1, 32, 32), seed=0).test
        load_model(model, str(weights))
        inputs, targets = test.__getitems__(range(len(test)))
        return int((model.eval()(inputs).argmax(1) == targets).sum()) / len(test)

    return accuracy
