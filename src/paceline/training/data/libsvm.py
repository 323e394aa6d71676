"""Load LIBSVM (SVMlight) files as dense float32 data sets."""

import bz2
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.links.files import limits
from paceline.training.data.dataset import (
    Dataset,
    Shape,
    TensorSamples,
    require_memory,
    require_nbytes,
    shape_text,
)
from paceline.training.data.sampler import stratified_split

_VALID_LINE = "a valid line: +1 3:0.5 7:1.25 (integer label, then index:value with rising indices)"
_OTHERWISE_COMPRESSED = (".gz", ".xz", ".zip")
_LESS = "use a part of the file"
_PIECE_NBYTES, _CHECKED_NBYTES = 2**20, 2**28
_INDEX_LIMIT = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class SparseFile:
    """A parsed file: float32 features (scipy CSR), a label per sample, and the text's size."""

    path: Path
    features: Any
    labels: NDArray[Any]
    nbytes: int


def _content_of(path: Path) -> bytes:
    """Read a file; decompress its content if its name ends in .bz2.

    Raises InvalidInput if the content exceeds the free memory, or if a .bz2 file decompresses to an
    implausibly large text.
    """
    if path.suffix in _OTHERWISE_COMPRESSED:
        raise InvalidInput(str(path), "must be a text file or a .bz2 file", hint="unpack the file")
    nbytes = path.stat().st_size
    if not (path.is_file() or path.is_dir()):  # reading a pipe would block
        raise InvalidInput(str(path), "is not a file")
    require_nbytes(nbytes, str(path), "the file", _LESS)
    if path.suffix != ".bz2":
        return path.read_bytes()
    try:
        most = max(limits.UNPACKED_AT_LEAST, limits.MOST_UNPACKED * nbytes)
        with bz2.open(path) as file:
            return b"".join(_pieces(file, path, most))
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInput(str(path), f"is not a valid bzip2 file: {error}") from error


def _pieces(file: IO[bytes], path: Path, most: int) -> Iterator[bytes]:
    """Yield unpacked pieces; raise InvalidInput if they exceed `most` bytes or the free memory."""
    found = 0
    while piece := file.read(_PIECE_NBYTES):
        found += len(piece)
        if found > most:
            problem = f"must unpack into at most {most:,} bytes"
            raise InvalidInput(str(path), problem, hint="unpack a larger file yourself")
        if found % _CHECKED_NBYTES < _PIECE_NBYTES:
            require_nbytes(found, str(path), "the unpacked text", _LESS)
        yield piece


def _parse(paths: Sequence[Path]) -> list[SparseFile]:
    """Parse files together, so that a feature index means the same column in every file."""
    from sklearn.datasets import load_svmlight_files

    contents = [_content_of(path) for path in paths]
    try:
        parsed = load_svmlight_files([io.BytesIO(text) for text in contents], dtype=np.float32)
    except (ValueError, OverflowError) as error:
        for path, content in zip(paths, contents, strict=True):
            _raise_first_fault(path, content)
        raise InvalidInput(str(paths[0]), f"is not a LIBSVM file: {error}") from error
    sizes = map(len, contents)
    files = [
        SparseFile(*entry) for entry in zip(paths, parsed[::2], parsed[1::2], sizes, strict=True)
    ]
    # Refuse values that scikit-learn accepts but training cannot use.
    for file, content in zip(files, contents, strict=True):
        has_odd_label = not np.all(np.floor(file.labels) == file.labels)
        has_odd_label |= not np.isfinite(file.labels).all()
        # Query ids ("qid") are for ranking; scikit-learn would skip them without an error.
        if has_odd_label or not np.isfinite(file.features.data).all() or b"qid" in content:
            _raise_first_fault(file.path, content)
        if not len(file.features.indices):
            missing = "features" if len(file.labels) else "samples"
            raise InvalidInput(str(file.path), f"has no {missing}", hint=_VALID_LINE)
    return files


def _raise_first_fault(path: Path, content: bytes) -> None:
    """Raise InvalidInput for the first invalid line, if any."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if fault := _fault(line):
            raise InvalidInput(str(path), f"line {number}: {fault}", hint=_VALID_LINE)


def _fault(line: bytes) -> str | None:
    """Return a description of the first error in a line; None if the line is valid."""
    label, *features = line.partition(b"#")[0].split() or [b"0"]
    try:
        if not float(label).is_integer():
            return f"label {_quoted(label)} is not an integer"
    except ValueError:
        return f"label {_quoted(label)} is not a number"
    previous = -1
    for word in features:
        index_text, _, value_text = word.partition(b":")
        try:
            index, value = int(index_text), float(value_text)
        except ValueError:
            return f"{_quoted(word)} is not index:value"
        if not previous < index < _INDEX_LIMIT:
            return f"the index of {_quoted(word)} must be from {previous + 1} to {_INDEX_LIMIT - 1}"
        if not abs(value) <= _FLOAT32_MAX:
            return f"the value of {_quoted(word)} is not a finite float32"
        previous = index
    return None


def _quoted(word: bytes) -> str:
    """Quote a word of a file, shortened for an error message."""
    text = word.decode("utf-8", errors="backslashreplace")
    return repr(text if len(text) <= 40 else text[:40] + "...")


def load_libsvm(path: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Load a file's samples as dense float32 values, without scaling.

    The test set is the file PATH.t (for NAME.bz2, the file NAME.t.bz2). If there is no such file,
    the test set is a fifth of each class's samples, chosen by `seed`. The distinct labels are
    replaced by 0, 1, 2 etc. in ascending order. `sample_shape` may have more values than the file's
    highest feature index, because the format omits zeros.
    """
    train, bz2 = Path(path), ".bz2" if path.endswith(".bz2") else ""
    test = Path(f"{path.removesuffix(bz2)}.t{bz2}")
    files = _parse([train, test] if test.exists() else [train])
    shape = sample_shape or (files[0].features.shape[1],)
    _check_size(files, shape, is_stated=sample_shape is None)
    classes = _classes_of(files)
    parts = [(file.features, np.searchsorted(classes, file.labels)) for file in files]
    if len(parts) == 1:
        # Split the sparse data, because splitting dense data would need twice the memory.
        [(features, targets)] = parts
        parts = [(features[rows], targets[rows]) for rows in stratified_split(targets, seed)]
    train_samples, test_samples = (
        TensorSamples(_dense(features, shape), torch.from_numpy(targets))
        for features, targets in parts
    )
    name = train.name.removesuffix(bz2)
    return Dataset(name, train_samples, test_samples, len(classes), shape)


def _check_size(files: Sequence[SparseFile], shape: Shape, *, is_stated: bool) -> None:
    """Raise InvalidInput if there are too many features for `shape` or for free memory.

    `is_stated`: only the file states the shape, by its highest feature index. Then also raises
    InvalidInput if this index is implausibly large for the file's size.
    """
    path, num_features = str(files[0].path), files[0].features.shape[1]
    if num_features > prod(shape):
        problem = f"has {num_features} features, more than input_shape {shape_text(shape)}"
        raise InvalidInput(path, problem)
    num_samples = sum(len(file.labels) for file in files)
    text_nbytes = sum(file.nbytes for file in files)
    nbytes = 4 * num_samples * num_features
    if is_stated and nbytes > max(limits.DENSE_AT_LEAST, limits.MOST_DENSE * text_nbytes):
        problem = f"has feature index {num_features:,}: dense samples would take {nbytes:,} bytes"
        raise InvalidInput(path, problem, hint="check whether this feature index is right")
    require_memory(num_samples, shape, path)


def _classes_of(files: Sequence[SparseFile]) -> Any:
    """Return the distinct labels of the first file (training), in ascending order.

    Raises InvalidInput if there is only one label, or if the test file has other labels.
    """
    classes = np.unique(files[0].labels)
    if len(classes) < 2:
        raise InvalidInput(str(files[0].path), "must have at least two classes", got=len(classes))
    for file in files[1:]:
        unknown = np.setdiff1d(file.labels, classes)
        if len(unknown):
            problem = f"has label {unknown[0]:g}, which is not in {files[0].path}"
            raise InvalidInput(str(file.path), problem)
    return classes


def _dense(features: Any, shape: Shape) -> torch.Tensor:
    features.resize((features.shape[0], prod(shape)))
    return torch.from_numpy(features.toarray()).reshape(-1, *shape)
