"""Folders of images: one folder for each class, with or without a split into train and test."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Dataset, shape_text
from paceline.data.images import ImageSamples, check_header
from paceline.data.split import stratified_split

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
_DEFAULT_SHAPE = (3, 224, 224)


def load_images(folder: str, sample_shape: tuple[int, ...] | None, seed: int) -> Dataset:
    """Return the images of FOLDER/train/CLASS and FOLDER/test/CLASS, or of FOLDER/CLASS split.

    Class numbers follow the sorted folder names. The header of every file is read here, so that a
    broken file is found before the training; the pixels are read batch by batch.
    """
    root = Path(folder)
    shape = _checked(sample_shape or _DEFAULT_SHAPE)
    if not root.is_dir():
        raise InvalidInput(f"there is no folder {root}")
    halves = [root / "train", root / "test"]
    if any(half.is_dir() for half in halves):
        classes, paths, targets = _read_halves(halves)
    else:
        classes, paths, targets = _read_and_split(root, seed)
    for path in (*paths[0], *paths[1]):
        check_header(path)
    train, test = (
        ImageSamples(tuple(files), torch.from_numpy(labels), shape)
        for files, labels in zip(paths, targets, strict=True)
    )
    return Dataset(root.resolve().name, train, test, len(classes), shape)


_Parts = tuple[list[str], list[list[Path]], list[NDArray[np.int64]]]


def _read_halves(halves: list[Path]) -> _Parts:
    for half in halves:
        if not half.is_dir():
            raise InvalidInput(
                f"there is no folder {half}: give both train and test, "
                f"or put the class folders into {half.parent}"
            )
    train, test = (_files_by_class(half) for half in halves)
    for name in sorted(train.keys() ^ test.keys()):
        here, there = halves if name in train else reversed(halves)
        raise InvalidInput(f"the class {name} is in {here}, but not in {there}")
    parts = [_flat(train), _flat(test)]
    return list(train), [paths for paths, _ in parts], [targets for _, targets in parts]


def _read_and_split(root: Path, seed: int) -> _Parts:
    by_class = _files_by_class(root)
    paths, targets = _flat(by_class)
    parts = stratified_split(targets, seed)
    return list(by_class), [_take(paths, rows) for rows in parts], [targets[r] for r in parts]


def _take(paths: Sequence[Path], rows: NDArray[np.int64]) -> list[Path]:
    return [paths[row] for row in rows]


def _flat(by_class: dict[str, list[Path]]) -> tuple[list[Path], NDArray[np.int64]]:
    paths = [path for files in by_class.values() for path in files]
    counts = [len(files) for files in by_class.values()]
    return paths, np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def _files_by_class(root: Path) -> dict[str, list[Path]]:
    """Return the image files of each class, both sorted by name."""
    folders = [entry for entry in _visible(root) if entry.is_dir()]
    for entry in _visible(root):
        if entry.suffix.lower() in SUFFIXES and not entry.is_dir():
            raise InvalidInput(f"{entry} belongs to no class: put it into a folder of {root}")
    if len(folders) < 2:
        raise InvalidInput(
            f"{root} has {len(folders)} class folders, but at least two are needed: "
            f"{root}/CLASS/IMAGE"
        )
    return {folder.name: _files(folder) for folder in folders}


def _files(folder: Path) -> list[Path]:
    files = _visible(folder)
    for path in files:
        if path.suffix.lower() not in SUFFIXES or path.is_dir():
            raise InvalidInput(
                f"{path} is not an image: a class folder may hold {', '.join(SUFFIXES)} files only"
            )
    if not files:
        raise InvalidInput(f"the class folder {folder} has no images")
    return files


def _visible(folder: Path) -> list[Path]:
    """Return the entries in order of their names, without the hidden files that systems leave."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _checked(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InvalidInput(
            f"images cannot have the sample shape {shape_text(shape)}: "
            "right would be 3xHxW (colour) or 1xHxW (grey)"
        )
    channels, height, width = shape
    return channels, height, width
