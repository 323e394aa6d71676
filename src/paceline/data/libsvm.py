"""Text files in the LIBSVM (SVMlight) format: a label, then index:value pairs, on each line."""

import io
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Dataset, TensorSamples, require_memory, shape_text
from paceline.data.split import stratified_split

_VALID_LINE = "'+1 3:0.5 7:1.25' (a whole number as label, then index:value with rising indices)"
_COMPRESSED = (".bz2", ".gz", ".xz", ".zip")
_INDEX_LIMIT = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class _File:
    path: Path
    features: Any  # scipy's CSR matrix or array, float32
    labels: NDArray[np.float64]


def load_libsvm(path: str, sample_shape: tuple[int, ...] | None, seed: int) -> Dataset:
    """Return the samples of the file as dense float32 values, exactly as they are written.

    The test set is the file `PATH.t` if there is one, else a stratified fifth. Labels become
    0..C-1 in ascending order. The format leaves out zeros, so a sample shape may hold more values
    than the highest index of the files; it cannot hold fewer.
    """
    paths = [Path(path), Path(f"{path}.t")]
    files = _read([paths[0], *(p for p in paths[1:] if p.exists())])
    shape = sample_shape or (files[0].features.shape[1],)
    inputs = _dense(files, shape)
    classes, targets = _targets(files)
    if len(files) == 2:
        train = TensorSamples(inputs[0], torch.from_numpy(targets[0]))
        test = TensorSamples(inputs[1], torch.from_numpy(targets[1]))
    else:
        train, test = (
            TensorSamples(inputs[0][rows], torch.from_numpy(targets[0][rows]))
            for rows in stratified_split(targets[0], seed)
        )
    return Dataset(paths[0].name, train, test, len(classes), shape)


def _read(paths: list[Path]) -> list[_File]:
    """Parse the files together, because their features must be numbered alike."""
    from sklearn.datasets import load_svmlight_files

    contents = [_content(path) for path in paths]
    try:
        parsed = load_svmlight_files([io.BytesIO(text) for text in contents], dtype=np.float32)
    except (ValueError, OverflowError) as error:
        for path, content in zip(paths, contents, strict=True):
            _raise_first_fault(path, content)
        raise InvalidInput(f"{paths[0]} is not a LIBSVM file: {error}") from error
    files = [_File(*entry) for entry in zip(paths, parsed[::2], parsed[1::2], strict=True)]
    for file, content in zip(files, contents, strict=True):
        _check(file, content)
    return files


def _content(path: Path) -> bytes:
    if path.suffix in _COMPRESSED:
        raise InvalidInput(f"{path} is compressed: unpack it first")
    return path.read_bytes()


def _check(file: _File, content: bytes) -> None:
    """Refuse what scikit-learn reads without complaint but cannot be trained on."""
    if not len(file.labels):
        raise InvalidInput(f"{file.path} has no samples; a valid line looks like {_VALID_LINE}")
    has_odd_label = not np.all(np.mod(file.labels, 1) == 0)
    # scikit-learn skips a query identifier, which belongs to ranking and not to classification.
    if has_odd_label or not np.isfinite(file.features.data).all() or b"qid" in content:
        _raise_first_fault(file.path, content)
    if not len(file.features.indices):
        raise InvalidInput(f"{file.path} has labels only; a valid line looks like {_VALID_LINE}")


def _dense(files: list[_File], shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the features of each file with the given sample shape."""
    num_features, num_values = files[0].features.shape[1], prod(shape)
    if num_features > num_values:
        raise InvalidInput(
            f"{files[0].path} has {num_features} features, "
            f"but the sample shape {shape_text(shape)} holds {num_values}"
        )
    require_memory(sum(len(file.labels) for file in files), shape, str(files[0].path))
    for file in files:
        file.features.resize((len(file.labels), num_values))
    return [torch.from_numpy(file.features.toarray()).reshape(-1, *shape) for file in files]


def _targets(files: list[_File]) -> tuple[NDArray[np.float64], list[NDArray[np.int64]]]:
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


def _raise_first_fault(path: Path, content: bytes) -> None:
    for number, line in enumerate(content.split(b"\n"), start=1):
        fault = _fault(line)
        if fault:
            raise InvalidInput(f"{path}, line {number}: {fault}; a valid line: {_VALID_LINE}")


def _fault(line: bytes) -> str | None:
    """Say what is wrong with a line; None if nothing is."""
    label, *features = line.partition(b"#")[0].split() or [b"0"]
    try:
        if not float(label).is_integer():
            return f"the label {_shown(label)} is not a whole number"
    except ValueError:
        return f"the label {_shown(label)} is not a number"
    previous = -1
    for feature in features:
        index_text, _, value_text = feature.partition(b":")
        try:
            index, value = int(index_text), float(value_text)
        except ValueError:
            return f"{_shown(feature)} is not index:value"
        if not previous < index < _INDEX_LIMIT:
            return f"the index of {_shown(feature)} is not from {previous + 1} to {_INDEX_LIMIT}"
        if not abs(value) <= _FLOAT32_MAX:
            return f"the value of {_shown(feature)} is not a finite float32"
        previous = index
    return None


def _shown(word: bytes) -> str:
    text = word.decode("utf-8", errors="backslashreplace")
    return repr(text if len(text) <= 40 else text[:40] + "...")
