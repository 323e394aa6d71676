"""Data sets from files in the LIBSVM (SVMlight) format, as dense float32 values."""

import bz2
import io
from collections.abc import Callable, Iterator, Sequence
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

_VALID_LINE = "'+1 3:0.5 7:1.25' (a whole number as label, then index:value with rising indices)"
_OTHERWISE_COMPRESSED = (".gz", ".xz", ".zip")
_PIECE_NBYTES, _CHECKED_NBYTES = 2**20, 2**28
_INDEX_LIMIT = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class SparseFile:
    """A parsed file: scipy's CSR features in float32, and a row of labels or one for each sample.

    Labels are numbers as they are written; of several for a sample, a bool for each there is.
    `nbytes` are those of its text.
    """

    path: Path
    features: Any
    labels: NDArray[Any]
    nbytes: int


def content_of(path: Path) -> bytes:
    """Return the text of a file, unpacked if its name ends in .bz2.

    Raises OSError for a file that cannot be read, InvalidInput for one that this machine's memory
    cannot hold, and for a small one that unpacks into more than any text does.
    """
    if path.suffix in _OTHERWISE_COMPRESSED:
        raise InvalidInput(str(path), "is compressed: unpack it first, or compress it with bzip2")
    nbytes = path.stat().st_size
    if not (path.is_file() or path.is_dir()):  # which cannot be opened; a pipe would wait
        raise InvalidInput(str(path), "cannot be read: it is no file")
    require_nbytes(nbytes, str(path), "the file", "take a part of it")
    if path.suffix != ".bz2":
        return path.read_bytes()
    try:
        most = max(limits.UNPACKED_AT_LEAST, limits.MOST_UNPACKED * nbytes)
        with bz2.open(path) as file:
            return b"".join(_pieces(file, path, most))
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInput(str(path), f"is damaged, or no bzip2 file: {error}") from error


def _pieces(file: IO[bytes], path: Path, most: int) -> Iterator[bytes]:
    """Yield what a packed file holds, a piece at a time, of at most so many bytes."""
    found = 0
    while piece := file.read(_PIECE_NBYTES):
        found += len(piece)
        if found > most:
            raise InvalidInput(
                str(path),
                f"unpacks into more than {most:,} bytes, {limits.MOST_UNPACKED} times its size, "
                "which no such text does",
                hint="unpack it yourself if it is right",
            )
        if found % _CHECKED_NBYTES < _PIECE_NBYTES:
            require_nbytes(found, str(path), "the unpacked text", "take a part of it")
        yield piece


def require_proportion(nbytes: int, text_nbytes: int, field: str, what: str) -> None:
    """Raise InvalidInput if dense values take far more bytes than the text that names them.

    `what` says which number of the file makes them so many.
    """
    if nbytes > max(limits.DENSE_AT_LEAST, limits.MOST_DENSE * text_nbytes):
        raise InvalidInput(
            field,
            f"{what}: dense values would take {nbytes:,} bytes, over {limits.MOST_DENSE} times the "
            f"{text_nbytes:,} bytes of the text",
            hint="is that number right?",
        )


def parse(paths: Sequence[Path]) -> list[SparseFile]:
    """Parse the files together, because their features must be numbered alike.

    InvalidInput names the file and the line of the first fault.
    """
    from sklearn.datasets import load_svmlight_files

    contents = [content_of(path) for path in paths]
    try:
        parsed = load_svmlight_files([io.BytesIO(text) for text in contents], dtype=np.float32)
    except (ValueError, OverflowError) as error:
        for path, content in zip(paths, contents, strict=True):
            raise_first_fault(path, content.split(b"\n"), _fault, _VALID_LINE)
        raise InvalidInput(str(paths[0]), f"is not a LIBSVM file: {error}") from error
    sizes = map(len, contents)
    files = [
        SparseFile(*entry) for entry in zip(paths, parsed[::2], parsed[1::2], sizes, strict=True)
    ]
    # Refuse what scikit-learn reads without complaint but cannot be trained on.
    for file, content in zip(files, contents, strict=True):
        if not len(file.labels):
            raise InvalidInput(
                str(file.path), "has no samples", hint=f"a valid line looks like {_VALID_LINE}"
            )
        has_odd_label = not np.all(np.floor(file.labels) == file.labels)
        has_odd_label |= not np.isfinite(file.labels).all()
        # It skips a query identifier, which belongs to ranking and not to classification.
        if has_odd_label or not np.isfinite(file.features.data).all() or b"qid" in content:
            raise_first_fault(file.path, content.split(b"\n"), _fault, _VALID_LINE)
        if not len(file.features.indices):
            raise InvalidInput(
                str(file.path), "has labels only", hint=f"a valid line looks like {_VALID_LINE}"
            )
    return files


def raise_first_fault(
    path: Path,
    lines: Sequence[bytes],
    fault_of: Callable[[bytes], str | None],
    valid_line: str,
    first: int = 1,
) -> None:
    """Raise InvalidInput for the first of the lines, which count from `first`, with a fault."""
    for number, line in enumerate(lines, start=first):
        fault = fault_of(line)
        if fault:
            raise InvalidInput(
                str(path), f"line {number}: {fault}", hint=f"a valid line: {valid_line}"
            )


def features_fault(words: Sequence[bytes], limit: int = _INDEX_LIMIT) -> str | None:
    """Return the fault of the index:value words of a line, or None: indices rise below `limit`."""
    previous = -1
    for word in words:
        index_text, _, value_text = word.partition(b":")
        try:
            index, value = int(index_text), float(value_text)
        except ValueError:
            return f"{quoted(word)} is not index:value"
        if not previous < index < limit:
            if previous + 1 >= limit:
                return f"the index of {quoted(word)} comes after the highest, {limit - 1}"
            return f"the index of {quoted(word)} is not from {previous + 1} to {limit - 1}"
        if not abs(value) <= _FLOAT32_MAX:
            return f"the value of {quoted(word)} is not a finite float32"
        previous = index
    return None


def quoted(word: bytes) -> str:
    """Return a word of a file in quotes, shortened for a message of one line."""
    text = word.decode("utf-8", errors="backslashreplace")
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _fault(line: bytes) -> str | None:
    label, *features = line.partition(b"#")[0].split() or [b"0"]
    try:
        if not float(label).is_integer():
            return f"the label {quoted(label)} is not a whole number"
    except ValueError:
        return f"the label {quoted(label)} is not a number"
    return features_fault(features)


def load_libsvm(path: str, sample_shape: Shape | None, seed: int) -> Dataset:
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
    files: Sequence[SparseFile],
    sample_shape: Shape | None,
    seed: int,
    adjust: Callable[[torch.Tensor], object] | None = None,
) -> Dataset:
    """Return the samples of a file, split, or of two: one for training and one for testing.

    `adjust` may change the dense values (n, num_features) in place.
    """
    shape = sample_shape or (files[0].features.shape[1],)
    _check_size(files, shape, states_size=sample_shape is None)
    classes = _classes_of(files)
    parts = [(file.features, np.searchsorted(classes, file.labels)) for file in files]
    if len(parts) == 1:
        # Split while they are sparse: dense values, once more, may not fit.
        [(features, targets)] = parts
        parts = [(features[rows], targets[rows]) for rows in stratified_split(targets, seed)]
    train, test = (
        TensorSamples(dense(features, shape, adjust), torch.from_numpy(targets))
        for features, targets in parts
    )
    return Dataset(name, train, test, len(classes), shape)


def _check_size(files: Sequence[SparseFile], shape: Shape, *, states_size: bool) -> None:
    """Raise InvalidInput for features beyond the shape, and for more values than memory holds.

    With `states_size` the file alone says how many features there are, and it may lie.
    """
    num_features = files[0].features.shape[1]
    if num_features > prod(shape):
        raise InvalidInput(
            str(files[0].path),
            f"has {num_features} features, but the sample shape {shape_text(shape)} holds "
            f"{prod(shape)}",
        )
    num_samples = sum(len(file.labels) for file in files)
    if states_size:
        text_nbytes = sum(file.nbytes for file in files)
        what = f"has the feature {num_features:,}"
        require_proportion(4 * num_samples * num_features, text_nbytes, str(files[0].path), what)
    require_memory(num_samples, shape, str(files[0].path))


def _classes_of(files: Sequence[SparseFile]) -> Any:
    """Return the labels of the first file in order, which are all that others may have."""
    classes = np.unique(files[0].labels)
    if len(classes) < 2:
        raise InvalidInput(
            str(files[0].path),
            f"has one class only (label {classes[0]:g}): at least two are needed",
        )
    for file in files[1:]:
        unknown = np.setdiff1d(file.labels, classes)
        if len(unknown):
            raise InvalidInput(
                str(file.path), f"has the label {unknown[0]:g}, which {files[0].path} has not"
            )
    return classes


def dense(
    features: Any, shape: Shape, adjust: Callable[[torch.Tensor], object] | None = None
) -> torch.Tensor:
    """Return sparse float32 rows as dense samples of a shape that holds them."""
    features.resize((features.shape[0], prod(shape)))
    values = torch.from_numpy(features.toarray())
    if adjust is not None:
        adjust(values)
    return values.reshape(-1, *shape)
