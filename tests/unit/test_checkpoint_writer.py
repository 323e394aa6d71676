"""Checkpoints written in the background contain the state at the call of `save`."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.writer import BackgroundWriter
from refusals import refused
from simulated_gpu.lent import simulated_gpus

DEADLINE_S = 300.0  # after which a hanging test fails


class SlowFolder(CheckpointFolder):
    """A folder whose `write` waits for the test."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, keep=9)
        self.may_write = threading.Event()
        self.addresses: list[dict[str, int]] = []

    def write(self, step: int, tensors: Mapping[str, Tensor], parts: Mapping[str, Any]) -> Path:
        self.addresses.append({name: one.data_ptr() for name, one in tensors.items()})
        assert self.may_write.wait(DEADLINE_S)
        return super().write(step, tensors, parts)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SlowFolder]:
    found = SlowFolder(tmp_path)
    yield found
    found.may_write.set()


@pytest.fixture
def writer(folder: SlowFolder) -> Iterator[BackgroundWriter]:
    before = set(threading.enumerate())
    found = BackgroundWriter(folder, DEADLINE_S)
    yield found
    folder.may_write.set()
    found.close()
    assert set(threading.enumerate()) <= before


def tensors_in(folder: CheckpointFolder) -> dict[str, Tensor]:
    return folder.latest().read()[0]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_one_that_comes_too_early_is_skipped_and_said(folder, writer, caplog):
    weight = torch.ones(5)
    writer.save(1, {"model/w": weight}, {})
    assert writer.is_writing
    writer.save(2, {"model/w": weight * 2}, {})
    writer.save(3, {"model/w": weight * 3}, {})
    (line,) = warnings_of(caplog)  # and none for step 3
    assert "step 2" in line
    folder.may_write.set()
    writer.close()
    assert folder.steps == (1,)
    assert torch.equal(tensors_in(folder)["model/w"], weight)


def test_save_with_wait_waits_for_the_previous_checkpoint(folder, writer):
    writer.save(1, {"model/w": torch.ones(5)}, {})
    waited, future = [], writer._writing

    def exception(timeout: float | None = None) -> BaseException | None:
        waited.append(timeout)
        folder.may_write.set()
        return Future.exception(future, timeout)

    future.exception = exception  # the first checkpoint is written once `save` waits for it
    writer.save(2, {"model/w": torch.zeros(5)}, {}, wait=True)
    assert waited
    assert folder.steps == (1, 2)
    assert torch.equal(tensors_in(folder)["model/w"], torch.zeros(5))


def test_a_checkpoint_beyond_the_deadline_causes_a_warning(folder, caplog):
    writer = BackgroundWriter(folder, deadline_s=0.01)
    writer.save(1, {"model/w": torch.ones(5)}, {}, wait=True)
    writer.save(2, {"model/w": torch.ones(5)}, {}, wait=True)
    writer.close()
    lines = warnings_of(caplog)
    assert len(lines) == 3
    assert all("step 1 " in line for line in lines)
    assert folder.steps == ()
    folder.may_write.set()
    writer._writing.exception(DEADLINE_S)
    writer.close()
    assert folder.steps == (1,)


def test_copies_reuse_their_memory(folder, writer):
    folder.may_write.set()
    other = torch.ones(3)
    for step, tensors in enumerate(
        (
            {"model/w": torch.ones(500), "model/x": other},
            {"model/x": other, "model/w": torch.zeros(500)},
            {"model/w": torch.zeros(500, dtype=torch.int32), "model/x": torch.ones(3, 1)},
        )
    ):
        writer.save(step, tensors, {}, wait=True)
    first, second, _ = folder.addresses
    assert first == second
    assert first["model/x"] != other.data_ptr()
    # Another type or shape needs new memory.
    assert tensors_in(folder)["model/w"].dtype == torch.int32
    assert tensors_in(folder)["model/x"].shape == (3, 1)
    # What a later checkpoint lacks is not in its files.
    writer.save(3, {"model/w": torch.ones(2)}, {}, wait=True)
    assert tensors_in(folder).keys() == {"model/w"}


def test_a_failed_write_causes_one_warning_and_the_next_write_is_tried(tmp_path, caplog):
    place = tmp_path / "place"
    place.touch()
    writer = BackgroundWriter(CheckpointFolder(place / "checkpoints"))
    writer.save(1, {"model/w": torch.ones(5)}, {}, wait=True)
    writer.poll()
    writer.poll()
    (line,) = warnings_of(caplog)
    assert line.startswith(f"{place}/checkpoints: ")
    place.unlink()
    writer.save(2, {"model/w": torch.ones(5)}, {}, wait=True)
    assert writer._folder.steps == (2,)
    assert len(warnings_of(caplog)) == 1
    writer.close()


class BrokenFolder(CheckpointFolder):
    def write(self, step: int, tensors: Mapping[str, Tensor], parts: Mapping[str, Any]) -> Path:
        raise AttributeError("a bug")


@pytest.mark.parametrize(
    "look", [BackgroundWriter.poll, BackgroundWriter.close, lambda one: one.save(2, {}, {})]
)
def test_a_bug_in_the_thread_is_an_error_of_the_caller(tmp_path, look: Callable):
    writer = BackgroundWriter(BrokenFolder(tmp_path))
    writer.save(1, {}, {})
    writer._writing.exception(DEADLINE_S)
    with pytest.raises(AttributeError, match="a bug"):
        look(writer)
    writer.close()


@pytest.mark.parametrize(
    ("tensors", "parts", "field"),
    [
        ({"model/w": torch.eye(2).to_sparse()}, {}, "model/w"),
        ({}, {"progress": {"a": object()}}, "progress.a"),
    ],
)
def test_save_refuses_unsupported_values(writer, tensors, parts, field) -> None:
    with refused(field):
        writer.save(1, tensors, parts)
    assert writer._writing is None


def test_later_changes_do_not_reach_the_checkpoint(folder, writer):
    """The host does not wait for copies from a GPU: they precede later work of its stream."""
    with simulated_gpus() as (gpu,):
        on_host = {"w": torch.ones(6), "t": torch.arange(12.0).reshape(4, 3).t()}
        tensors = {f"host/{name}": one for name, one in on_host.items()}
        tensors |= {f"gpu/{name}": one.to(gpu.torch_device) for name, one in on_host.items()}
        progress = {"steps": [0]}
        for step in (1, 2):
            gpu.synchronize()
            expected = {name: one.cpu().clone() for name, one in tensors.items()}
            blocking, folder.may_write = gpu.num_blocking_copies, threading.Event()
            gpu.delays = lambda stream, what: 0.02
            writer.save(step, tensors, {"progress": progress})
            assert gpu.num_blocking_copies == blocking
            for tensor in tensors.values():
                tensor.add_(1)
            progress["steps"].append(step)
            gpu.delays = lambda stream, what: 0.0
            folder.may_write.set()
            writer._writing.exception(DEADLINE_S)
            found, parts = folder.latest().read()
            assert found.keys() == expected.keys()
            assert all(torch.equal(one, expected[name]) for name, one in found.items())
            assert parts == {"progress": {"steps": [*range(step)]}}
        writer.close()
