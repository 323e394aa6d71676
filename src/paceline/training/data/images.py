"""Load images from class folders; decode the images of a batch when the batch is read."""

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
from paceline.links.files import limits
from paceline.training.data.dataset import Dataset, IndexedSamples, Pair, Shape, shape_text
from paceline.training.data.sampler import stratified_split

# Allow only these formats: a renamed file could otherwise select one of Pillow's rarer decoders,
# which are a security risk.
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
_DEFAULT_SHAPE = (3, 224, 224)


@dataclass(frozen=True, eq=False)
class ImageSamples(IndexedSamples):
    """Images of `shape` (channels, height, width) with values from -1 (black) to 1.

    Three channels are RGB, one channel is grey. Images are stretched to the height and width.
    Reading a sample raises InvalidInput for an unreadable image.
    """

    paths: tuple[Path, ...]
    targets: Tensor
    shape: Shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        channels, height, width = self.shape
        pixels = np.empty((len(indices), height, width, channels), dtype=np.uint8)
        for row, index in enumerate(indices):
            with _opened(self.paths[index]) as image:
                if "transparency" in image.info:
                    # Avoid Pillow's warning about converting a transparent palette to RGB directly.
                    image = image.convert("RGBA")
                image = image.convert("RGB" if channels == 3 else "L")
                image = image.resize((width, height), Image.Resampling.BILINEAR)
                pixels[row] = np.asarray(image).reshape(height, width, channels)
        inputs = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        inputs = inputs.to(torch.float32, memory_format=torch.contiguous_format)
        return inputs.div_(127.5).sub_(1.0), self.targets[torch.as_tensor(indices)]


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image and check its header; Pillow reads the pixels when they are accessed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as image:
                if image.width * image.height > limits.PIXELS:
                    size = f"{image.width}x{image.height}"
                    problem = f"must have at most {limits.PIXELS:,} pixels"
                    raise InvalidInput(str(path), problem, got=size)
                # Pillow would silently clip integer (I) and float (F) pixels to 8 bits.
                if image.mode.startswith(("I", "F")):
                    problem = "must have 8 bits per channel"
                    raise InvalidInput(str(path), problem, got=image.mode)
                yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidInput(str(path), f"has too many pixels: {error}") from error
    except UnidentifiedImageError as error:
        raise InvalidInput(str(path), "is not a PNG, JPEG, BMP or WebP image") from error
    except _BROKEN as error:
        raise InvalidInput(str(path), f"is not a readable image: {error}") from error


def load_images(folder: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Load the images of FOLDER/train/CLASS and FOLDER/test/CLASS, or of FOLDER/CLASS.

    Images of FOLDER/CLASS are split by `seed` into training and test images. The headers of all
    images are read immediately, to find broken files before training.
    """
    shape = sample_shape or _DEFAULT_SHAPE
    if len(shape) != 3 or shape[0] not in (1, 3):
        problem = "must be 3xHxW (colour) or 1xHxW (grey) for data images:FOLDER"
        raise InvalidInput("input_shape", problem, got=shape_text(shape))
    root = Path(folder)
    if not root.is_dir():
        raise InvalidInput("data", "must name a folder", got=folder)
    parts, num_classes = _parts(root, seed)
    for paths, _ in parts:
        for path in paths:
            with _opened(path):  # raises InvalidInput for a broken header
                pass
    train, test = (
        ImageSamples(tuple(paths), torch.from_numpy(targets), shape) for paths, targets in parts
    )
    return Dataset(root.resolve().name, train, test, num_classes, shape)


_Files = tuple[list[Path], NDArray[np.int64]]  # image files, and the class number of each file


def _parts(root: Path, seed: int) -> tuple[list[_Files], int]:
    """Return [training files, test files], and the number of classes."""
    halves = [root / "train", root / "test"]
    if not any(half.is_dir() for half in halves):
        by_class = _files_by_class(root)
        paths, targets = _flat(by_class)
        rows_of_parts = stratified_split(targets, seed)
        return [([paths[i] for i in rows], targets[rows]) for rows in rows_of_parts], len(by_class)
    for half in halves:
        if not half.is_dir():
            hint = f"add this folder, or put the class folders into {root}"
            raise InvalidInput("data", f"has no folder {half}", hint=hint)
    by_class, tests = (_files_by_class(half) for half in halves)
    for name in sorted(by_class.keys() ^ tests.keys()):
        here, there = halves if name in by_class else reversed(halves)
        raise InvalidInput("data", f"has class {name} in {here}, but not in {there}")
    return [_flat(by_class), _flat(tests)], len(by_class)


def _flat(by_class: dict[str, list[Path]]) -> _Files:
    paths = [path for files in by_class.values() for path in files]
    counts = [len(files) for files in by_class.values()]
    return paths, np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def _files_by_class(root: Path) -> dict[str, list[Path]]:
    """Return the image files of each class; classes and files are sorted by name."""
    folders = [entry for entry in _visible(root) if entry.is_dir()]
    for entry in _visible(root):
        if entry.suffix.lower() in SUFFIXES and not entry.is_dir():
            raise InvalidInput(str(entry), f"must be in a class folder: {root}/CLASS/IMAGE")
    if len(folders) < 2:
        problem = f"must have at least two class folders: {root}/CLASS/IMAGE"
        raise InvalidInput(str(root), problem, got=len(folders))
    by_class = {}
    for folder in folders:
        files = _visible(folder)
        for path in files:
            if path.suffix.lower() not in SUFFIXES or path.is_dir():
                raise InvalidInput(str(path), f"must be an image: {', '.join(SUFFIXES)}")
        if not files:
            raise InvalidInput(str(folder), "has no images")
        by_class[folder.name] = files
    return by_class


def _visible(folder: Path) -> list[Path]:
    """Return the folder's entries sorted by name, without hidden files."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
