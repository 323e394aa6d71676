"""Image files, decoded when a batch asks for them."""

import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Batch

# Only these decoders run, so that a renamed file cannot reach one of Pillow's rarer formats.
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)


@dataclass(frozen=True, eq=False)
class ImageSamples:
    """Images of `shape` (channels, height, width) with values from -1 (black) to 1.

    Three channels are red, green and blue, one channel is grey. The image is stretched to the
    height and width. Taking samples raises InvalidInput for a file that is not a readable image.
    """

    paths: tuple[Path, ...]
    targets: Tensor
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Batch:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return one batch; see Samples."""
        pixels = np.stack([_decode(self.paths[index], self.shape) for index in indices])
        inputs = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        inputs = inputs.to(torch.float32, memory_format=torch.contiguous_format)
        return inputs.div_(127.5).sub_(1.0), self.targets[torch.as_tensor(indices)]


def check_header(path: Path) -> None:
    """Raise InvalidInput if the file does not begin like an image that can be decoded."""
    with _opened(path):
        pass


def _decode(path: Path, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return the pixels as (height, width, channels)."""
    channels, height, width = shape
    with _opened(path) as image:
        if "transparency" in image.info:
            image = image.convert("RGBA")  # Pillow warns about the direct way from a palette
        image = image.convert("RGB" if channels == 3 else "L")
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image, dtype=np.uint8).reshape(height, width, channels)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image; Pillow reads the header now and the pixels when they are asked for."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as image:
                _check_depth(path, image.mode)
                yield image
    except _BOMBS as error:
        raise InvalidInput(f"{path} has too many pixels to be decoded safely: {error}") from error
    except UnidentifiedImageError as error:
        raise InvalidInput(f"{path} is not a PNG, JPEG, BMP or WebP image") from error
    except _BROKEN as error:
        raise InvalidInput(f"{path} is not a readable image: {error}") from error


def _check_depth(path: Path, mode: str) -> None:
    # Pillow would cut the values of these modes to 8 bits without a word.
    if mode.startswith(("I", "F")):
        raise InvalidInput(f"{path} has more than 8 bits per pixel: convert it to 8")
