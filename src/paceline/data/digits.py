"""Real handwriting: the 1,797 digits of 8x8 pixels that come with scikit-learn."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Dataset, TensorSamples, require_memory, shape_text
from paceline.data.split import stratified_split

_NUM_CLASSES = 10
_SIDE = 8


def load_digits(sample_shape: tuple[int, ...] | None, seed: int) -> Dataset:
    """Return the digits as 1x8x8, or flat as 64, or resized to 1xHxW or 3xHxW.

    The pixels are shifted and scaled so that those of the training samples have mean 0 and standard
    deviation 1 before any resizing.
    """
    shape = sample_shape or (1, _SIDE, _SIDE)
    _check(shape)
    from sklearn import datasets

    bunch = datasets.load_digits()
    train, test = stratified_split(bunch.target.astype("int64"), seed)
    require_memory(len(bunch.target), (1, *shape[1:]), "digits")

    pixels = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    pixels = (pixels - pixels[train].mean()) / pixels[train].std(correction=0)
    targets = torch.as_tensor(bunch.target, dtype=torch.int64)

    def part(rows: Tensor) -> TensorSamples:
        return TensorSamples(_reshaped(pixels[rows], shape), targets[rows])

    train_rows, test_rows = torch.from_numpy(train), torch.from_numpy(test)
    return Dataset("digits", part(train_rows), part(test_rows), _NUM_CLASSES, shape)


def _check(shape: tuple[int, ...]) -> None:
    is_image = len(shape) == 3 and shape[0] in (1, 3)
    if not is_image and shape != (_SIDE * _SIDE,):
        raise InvalidInput(
            f"digits cannot have the sample shape {shape_text(shape)}: "
            f"right would be {_SIDE * _SIDE}, 1xHxW or 3xHxW"
        )


def _reshaped(pixels: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return (n, 1, 8, 8) pixels as (n, *shape)."""
    if len(shape) == 1:
        return pixels.flatten(1)
    channels, height, width = shape
    if (height, width) != (_SIDE, _SIDE):
        pixels = F.interpolate(pixels, (height, width), mode="bilinear", align_corners=False)
    # A view: the repeated channels take no memory, only those of a batch are ever written out.
    return pixels.expand(-1, channels, -1, -1)
