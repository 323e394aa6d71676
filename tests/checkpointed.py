"""What tests read back of a checkpoint."""

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoints.folder import CheckpointFolder


def through_files(tensors: dict[str, Tensor], values: Any) -> tuple[dict[str, Tensor], Any]:
    """Return what comes back of a checkpoint."""
    with tempfile.TemporaryDirectory() as place:
        folder = CheckpointFolder(Path(place))
        folder.write(1, {"a.safetensors": tensors, "a.json": values})
        loaded = folder.latest()
        return loaded.tensors("a"), loaded.json("a")
