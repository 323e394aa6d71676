"""The LIBSVM (SVMlight) format as text: a label, then index:value pairs, on each line."""

import bz2
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput

_VALID_LINE = "'+1 3:0.5 7:1.25' (a whole number as label, then index:value with rising indices)"
_OTHERWISE_COMPRESSED = (".gz", ".xz", ".zip")
_INDEX_LIMIT = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class File:
    """A parsed file: scipy's CSR features in float32, and the labels as they are written."""

    path: Path
    features: Any
    labels: NDArray[np.float64]


def content_of(path: Path) -> bytes:
    """Return the text of a file, unpacked if its name ends in .bz2."""
    if path.suffix in _OTHERWISE_COMPRESSED:
        raise InvalidInput(f"{path} is compressed: unpack it first, or compress it with bzip2")
    content = path.read_bytes()
    if path.suffix != ".bz2":
        return content
    try:
        return bz2.decompress(content)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is damaged, or no bzip2 file: {error}") from error


def parse(paths: Sequence[Path]) -> list[File]:
    """Parse the files together, because their features must be numbered alike.

    InvalidInput names the file and the line of the first fault.
    """
    from sklearn.datasets import load_svmlight_files

    contents = [content_of(path) for path in paths]
    try:
        parsed = load_svmlight_files([io.BytesIO(text) for text in contents], dtype=np.float32)
    except (ValueError, OverflowError) as error:
        for path, content in zip(paths, contents, strict=True):
            _raise_first_fault(path, content)
        raise InvalidInput(f"{paths[0]} is not a LIBSVM file: {error}") from error
    files = [File(*entry) for entry in zip(paths, parsed[::2], parsed[1::2], strict=True)]
    for file, content in zip(files, contents, strict=True):
        _check(file, content)
    return files


def features_fault(words: Sequence[bytes], first: int = 0, limit: int = _INDEX_LIMIT) -> str | None:
    """Say what is wrong with the index:value words of a line; None if nothing is.

    Indices rise from `first` and stay below `limit`.
    """
    previous = first - 1
    for word in words:
        index_text, _, value_text = word.partition(b":")
        try:
            index, value = int(index_text), float(value_text)
        except ValueError:
            return f"{shown(word)} is not index:value"
        if not previous < index < limit:
            if previous + 1 >= limit:
                return f"the index of {shown(word)} comes after the highest, {limit - 1}"
            return f"the index of {shown(word)} is not from {previous + 1} to {limit - 1}"
        if not abs(value) <= _FLOAT32_MAX:
            return f"the value of {shown(word)} is not a finite float32"
        previous = index
    return None


def shown(word: bytes) -> str:
    """Return a word of a file in quotes, shortened for a message of one line."""
    text = word.decode("utf-8", errors="backslashreplace")
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _check(file: File, content: bytes) -> None:
    """Refuse what scikit-learn reads without complaint but cannot be trained on."""
    if not len(file.labels):
        raise InvalidInput(f"{file.path} has no samples; a valid line looks like {_VALID_LINE}")
    has_odd_label = not np.all(np.mod(file.labels, 1) == 0)
    # scikit-learn skips a query identifier, which belongs to ranking and not to classification.
    if has_odd_label or not np.isfinite(file.features.data).all() or b"qid" in content:
        _raise_first_fault(file.path, content)
    if not len(file.features.indices):
        raise InvalidInput(f"{file.path} has labels only; a valid line looks like {_VALID_LINE}")


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
            return f"the label {shown(label)} is not a whole number"
    except ValueError:
        return f"the label {shown(label)} is not a number"
    return features_fault(features)
