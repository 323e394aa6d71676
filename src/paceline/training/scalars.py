"""What an epoch achieved, for TensorBoard, which is an extra."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from paceline.core.errors import InvalidInput
from paceline.training.loop import Epoch


def require_tensorboard() -> None:
    """Raise InvalidInput if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise InvalidInput(
            "tensorboard: is not installed; it is an extra: pip install 'paceline[tensorboard]'"
        )


class Scalars:
    """An event file in a folder of its own: scalars by epochs, counted from one.

    InvalidInput if the folder cannot be made. To be closed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"tensorboard: cannot make {folder}: {error.strerror}") from None
        from torch.utils.tensorboard import SummaryWriter  # an extra

        self._writer = SummaryWriter(str(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def epoch(self, epoch: Epoch, num_samples: int, score: str) -> None:
        """Add losses, score and samples a second of an epoch that trained on so many samples."""
        number = epoch.number + 1
        values = {
            "loss/train": epoch.train_loss,
            "loss/test": epoch.test_loss,
            f"{score}/test": epoch.accuracy,
            "throughput/samples_per_s": num_samples / epoch.seconds,
        }
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def step(self, number: int, seconds: Mapping[str, float]) -> None:
        """Add where a typical step of an epoch goes: seconds by quantity, such as "forward"."""
        for quantity, value in seconds.items():
            self._writer.add_scalar(f"step/{quantity}_s", value, number + 1)
