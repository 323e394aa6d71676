"""A state that one process writes and another reads: a file in memory that both have open.

It is a file of safetensors, in which the plain values are bytes. One of both writes it while the
other leaves it alone.
"""

import os
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints import json_values, tensor_file
from paceline.checkpoints.json_values import Json
from paceline.checkpoints.tensor_file import Tensors, within
from paceline.core.errors import InvalidInput

_TENSORS, _VALUES = "tensors/", "values"  # names in the file


def write_state(fd: int, tensors: Mapping[str, Tensor], values: Json) -> None:
    """Write tensors and plain values to a file in memory, in place of its contents.

    Raises InvalidInput if the machine does not give so much memory, or values are not plain.
    """
    text = bytearray(json_values.dumps("state", values))
    whole = {f"{_TENSORS}{name}": one.detach().cpu() for name, one in tensors.items()}
    whole[_VALUES] = torch.frombuffer(text, dtype=torch.uint8)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.seek(0)
            file.truncate()
            tensor_file.write(whole, file.write)
    except OSError as error:
        raise InvalidInput("shared memory", f"a state does not fit: {error.strerror}") from error


def read_state(fd: int) -> tuple[Tensors, Json]:
    """Return copies of the tensors of such a file, and its values.

    Raises InvalidInput for a file that `write_state` has not written.
    """
    try:
        # Copies: the library's are views of the file, which is written again.
        found = {key: one.clone() for key, one in load_file(f"/proc/self/fd/{fd}").items()}
        values = json_values.loads(found.pop(_VALUES).numpy().tobytes())
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput("the state of a worker", f"cannot be read: {error}") from None
    return within(found, _TENSORS), values
