"""Tensors and values that are written to a checkpoint and read back."""

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.tensor_file import within


def through_files(tensors: dict[str, Tensor], values: Any) -> tuple[dict[str, Tensor], Any]:
    """Write tensors and values to a checkpoint, and read them back."""
    with tempfile.TemporaryDirectory() as place:
        folder = CheckpointFolder(Path(place))
        folder.write(1, {f"a/{name}": one for name, one in tensors.items()}, {"a": values})
        tensors, parts = folder.latest().read()
        return within(tensors, "a/"), parts["a"]
