"""What a worker alone knows, for a checkpoint: its optimizers' state and its random numbers.

It travels through a file in memory that coordinator and worker both have open:

    [length of the header][header: JSON][tensors, each at a cache line]

The coordinator asks the worker to write it, or to read it, and leaves it alone meanwhile.
"""

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.errors import InvalidInput
from paceline.core.reading import read_record
from paceline.core.settings import Record
from paceline.devices import Device
from paceline.files import limits
from paceline.links.shared_memory import ALIGNMENT, TensorSpec, check_place, placed, tensors_in

Tensors = dict[str, Tensor]


class _Header(Record):
    entries: list[TensorSpec]
    values: Any


_HEADER = TypeAdapter(_Header)
_LENGTH_NBYTES = 8
_RANDOM, _DEVICE_RANDOM = "random", "device_random"


def write_state(fd: int, tensors: Mapping[str, Tensor], values: Any) -> None:
    """Write tensors and plain values to a file in memory, which grows for them.

    Raises InvalidInput if the machine does not give so much memory, or values are not plain.
    """
    entries, nbytes = placed(tensors)
    try:
        header = json.dumps({"entries": entries, "values": values}).encode()
    except TypeError as error:
        raise InvalidInput("optimizer", f"its state cannot be saved: {error}") from error
    start = _start(len(header))
    try:
        # It never shrinks: what the coordinator has read of it stays mapped.
        os.posix_fallocate(fd, 0, start + max(1, nbytes))
    except OSError as error:
        raise InvalidInput(
            "shared memory",
            f"the state of the optimizers needs {nbytes:,} bytes of this machine, which it does "
            f"not give: {error.strerror}",
        ) from error
    os.pwrite(fd, len(header).to_bytes(_LENGTH_NBYTES, "little") + header, 0)
    for name, place in tensors_in(_mapped(fd, start), entries).items():
        place.copy_(tensors[name].detach())


def read_state(fd: int) -> tuple[Tensors, Any]:
    """Return the tensors and values of such a file; the tensors until it is written again.

    Raises InvalidInput for a file that `write_state` has not written.
    """
    what, nbytes = "the state of a worker", os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, _LENGTH_NBYTES, 0), "little")
    if length > limits.CHECKPOINT_VALUES or _start(length) > nbytes:
        raise InvalidInput(what, f"a header of {length:,} bytes in a file of {nbytes:,}")
    header = read_record(_HEADER, os.pread(fd, length, _LENGTH_NBYTES), what)
    for one in header.entries:
        check_place(one, nbytes - _start(length), what)
    return tensors_in(_mapped(fd, _start(length)), header.entries), header.values


def within(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors whose names begin so, by the rest of their names."""
    own = (name for name in tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): tensors[name] for name in own}


def _start(header_nbytes: int) -> int:
    return -(-(_LENGTH_NBYTES + header_nbytes) // ALIGNMENT) * ALIGNMENT


def _mapped(fd: int, start: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)[start:]


def state_of(optimizers: Sequence[Optimizer], device: Device) -> tuple[Tensors, list[Any]]:
    """Return the state of a worker's optimizers, one for each thread, and its random numbers."""
    tensors: Tensors = {_RANDOM: torch.get_rng_state()}
    if (random := device.random_state()) is not None:
        tensors[_DEVICE_RANDOM] = random
    values = []
    for number, optimizer in enumerate(optimizers):
        own, plain = _optimizer_state(optimizer)
        tensors |= {f"{number}/{key}": one for key, one in own.items()}
        values.append(plain)
    return tensors, values


def load_state(
    optimizers: Sequence[Optimizer], device: Device, tensors: Tensors, values: Sequence[Any]
) -> None:
    """Load what `state_of` has returned; InvalidInput if it is of other optimizers."""
    for number, (optimizer, plain) in enumerate(zip(optimizers, values, strict=True)):
        _load_optimizer_state(optimizer, within(tensors, f"{number}/"), plain)
    torch.set_rng_state(tensors[_RANDOM].clone())
    if device.random_state() is not None and _DEVICE_RANDOM in tensors:
        device.set_random_state(tensors[_DEVICE_RANDOM].clone())


def _optimizer_state(optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors by INDEX/KEY, and plain values by index and key: all but options of groups.

    The options are those of the settings, and learning rates those of each batch.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise InvalidInput(
            "optimizer", f"{kind} is not a torch.optim.Optimizer, and cannot be saved"
        )
    tensors: Tensors = {}
    plain: dict[str, dict[str, Any]] = {}
    for index, own in optimizer.state_dict()["state"].items():
        is_tensor = {key: isinstance(value, Tensor) for key, value in own.items()}
        tensors |= {f"{index}/{key}": own[key] for key, is_one in is_tensor.items() if is_one}
        plain[str(index)] = {key: own[key] for key, is_one in is_tensor.items() if not is_one}
    return tensors, {"kind": kind, "parameters": _shapes(optimizer), "state": plain}


def _load_optimizer_state(optimizer: Optimizer, tensors: Tensors, values: Any) -> None:
    kind = type(optimizer).__name__
    if values["kind"] != kind:
        raise InvalidInput(
            "optimizer", f"the checkpoint's optimizer is {values['kind']}, and this one {kind}"
        )
    if values["parameters"] != _shapes(optimizer):
        raise InvalidInput(
            "optimizer", f"the checkpoint's {kind} has other parameters, or in another order"
        )
    state = {int(index): dict(plain) for index, plain in values["state"].items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition("/")
        state[int(index)][key] = tensor.clone()
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _shapes(optimizer: Optimizer) -> list[list[list[int]]]:
    return [[list(one.shape) for one in group["params"]] for group in optimizer.param_groups]
