"""Load LIBSVM (SVMlight) files as dense float32 data sets."""

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
    """A parsed file: float32 CSR features, and a label or a row of labels for each sample.

    Single labels keep their values; several labels per sample become a bool for each label.
    `nbytes`: size of the text.
    """

    path: Path
    features: Any
    labels: NDArray[Any]
    nbytes: int


def content_of(path: Path) -> bytes:
    """Read a file, decompressed if its name ends in .bz2.

    Raises OSError for an unreadable file, and InvalidInput if it exceeds this machine's memory or
    decompresses implausibly far.
    """
    if path.suffix in _OTHERWISE_COMPRESSED:
        raise InvalidInput(str(path), "is compressed: unpack it first, or compress it with bzip2")
    nbytes = path.stat().st_size
    if not (path.is_file() or path.is_dir()):  # raises for a folder; opening a pipe would block
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
    """Yield the decompressed content in pieces, up to a limit."""
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
    """Raise InvalidInput if dense values need implausibly more bytes than the text.

    `what`: describes the number in the file that causes the size.
    """
    if nbytes > max(limits.DENSE_AT_LEAST, limits.MOST_DENSE * text_nbytes):
        raise InvalidInput(
            field,
            f"{what}: dense values would take {nbytes:,} bytes, over {limits.MOST_DENSE} times the "
            f"{text_nbytes:,} bytes of the text",
            hint="is that number right?",
        )


def parse(paths: Sequence[Path]) -> list[SparseFile]:
    """Parse files together, so that their features have the same numbers.

    InvalidInput names the file and line of the first error.
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
    # Refuse values that scikit-learn accepts but training cannot use.
    for file, content in zip(files, contents, strict=True):
        if not len(file.labels):
            raise InvalidInput(
                str(file.path), "has no samples", hint=f"a valid line looks like {_VALID_LINE}"
            )
        has_odd_label = not np.all(np.floor(file.labels) == file.labels)
        has_odd_label |= not np.isfinite(file.labels).all()
        # scikit-learn skips query ids, which are for ranking.
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
    """Raise InvalidInput for the first invalid line; numbers start at `first`."""
    for number, line in enumerate(lines, start=first):
        fault = fault_of(line)
        if fault:
            raise InvalidInput(
                str(path), f"line {number}: {fault}", hint=f"a valid line: {valid_line}"
            )


def features_fault(words: Sequence[bytes], limit: int = _INDEX_LIMIT) -> str | None:
    """Return the error in index:value words, or None; indices must increase below `limit`."""
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
    """Quote a word of a file, shortened for an error message."""
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
    """Load a file's samples as dense float32 values, without scaling.

    The test set is PATH.t if it exists (PATH.t.bz2 for a PATH in .bz2), otherwise a stratified
    fifth. Labels become 0..C-1 in ascending order. `sample_shape` may have more values than the
    highest index, because the format omits zeros.
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
    """Build a data set from one file, which is split, or from a training and a test file.

    `adjust` may change the dense values (n, num_features) in place.
    """
    shape = sample_shape or (files[0].features.shape[1],)
    _check_size(files, shape, states_size=sample_shape is None)
    classes = _classes_of(files)
    parts = [(file.features, np.searchsorted(classes, file.labels)) for file in files]
    if len(parts) == 1:
        # Split sparse data: a second dense copy may not fit into memory.
        [(features, targets)] = parts
        parts = [(features[rows], targets[rows]) for rows in stratified_split(targets, seed)]
    train, test = (
        TensorSamples(dense(features, shape, adjust), torch.from_numpy(targets))
        for features, targets in parts
    )
    return Dataset(name, train, test, len(classes), shape)


def _check_size(files: Sequence[SparseFile], shape: Shape, *, states_size: bool) -> None:
    """Raise InvalidInput if features exceed the shape, or values exceed the memory.

    `states_size`: only the file states the number of features, which may be implausible.
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
    """Return the sorted labels of the first file; InvalidInput if another file has more."""
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
    """Convert sparse rows to dense samples of a shape."""
    features.resize((features.shape[0], prod(shape)))
    values = torch.from_numpy(features.toarray())
    if adjust is not None:
        adjust(values)
    return values.reshape(-1, *shape)
