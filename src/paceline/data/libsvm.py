"""Data sets from files in the LIBSVM format, as dense float32 values."""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Dataset, TensorSamples, require_memory, shape_text
from paceline.data.split import stratified_split
from paceline.data.svmlight import File, parse


def load_libsvm(path: str, sample_shape: tuple[int, ...] | None, seed: int) -> Dataset:
    """Return the samples of the file as dense float32 values, exactly as they are written.

    The test set is the file `PATH.t` if there is one, else a stratified fifth. Labels become
    0..C-1 in ascending order. The format leaves out zeros, so a sample shape may hold more values
    than the highest index of the files; it cannot hold fewer. PATH may end in .bz2, and then the
    test set's name ends in .t.bz2.
    """
    train, bz2 = Path(path), ".bz2" if path.endswith(".bz2") else ""
    test = Path(f"{path.removesuffix(bz2)}.t{bz2}")
    files = parse([train, test] if test.exists() else [train])
    return dataset_of(train.name.removesuffix(bz2), files, sample_shape, seed)


def dataset_of(
    name: str,
    files: Sequence[File],
    sample_shape: tuple[int, ...] | None,
    seed: int,
    adjust: Callable[[torch.Tensor], object] = lambda _: None,
) -> Dataset:
    """Return the samples of a file, split, or of two: one for training and one for testing.

    `adjust` may change the dense values (n, num_features) in place.
    """
    shape = sample_shape or (files[0].features.shape[1],)
    _check_shape(files, shape)
    classes, targets = _targets(files)
    parts: list[tuple[Any, NDArray[np.int64]]] = [
        (file.features, numbers) for file, numbers in zip(files, targets, strict=True)
    ]
    if len(files) == 1:
        # Split while they are sparse: dense values, once more, may not fit.
        rows_of_parts = stratified_split(targets[0], seed)
        parts = [(files[0].features[rows], targets[0][rows]) for rows in rows_of_parts]
    train, test = (
        TensorSamples(dense(features, shape, adjust), torch.from_numpy(numbers))
        for features, numbers in parts
    )
    return Dataset(name, train, test, len(classes), shape)


def dense(
    features: Any,
    shape: tuple[int, ...],
    adjust: Callable[[torch.Tensor], object] = lambda _: None,
) -> torch.Tensor:
    """Return sparse float32 rows as dense samples of a shape that holds them."""
    features.resize((features.shape[0], prod(shape)))
    values = torch.from_numpy(features.toarray())
    adjust(values)
    return values.reshape(-1, *shape)


def _check_shape(files: Sequence[File], shape: tuple[int, ...]) -> None:
    num_features, num_values = files[0].features.shape[1], prod(shape)
    if num_features > num_values:
        raise InvalidInput(
            f"{files[0].path} has {num_features} features, "
            f"but the sample shape {shape_text(shape)} holds {num_values}"
        )
    require_memory(sum(len(file.labels) for file in files), shape, str(files[0].path))


def _targets(files: Sequence[File]) -> tuple[NDArray[np.float64], list[NDArray[np.int64]]]:
    """Return the labels of the classes, and the class number of each sample of each file."""
    classes = np.unique(files[0].labels)
    if len(classes) < 2:
        raise InvalidInput(
            f"{files[0].path} has one class only (label {classes[0]:g}): at least two are needed"
        )
    for file in files[1:]:
        unknown = np.setdiff1d(file.labels, classes)
        if len(unknown):
            raise InvalidInput(
                f"{file.path} has the label {unknown[0]:g}, which {files[0].path} has not"
            )
    return classes, [np.searchsorted(classes, file.labels).astype(np.int64) for file in files]
