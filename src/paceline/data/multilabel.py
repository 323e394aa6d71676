"""The text format of the Extreme Classification Repository: several labels on a line.

The first line has the numbers of samples, features and labels. Each further line is a sample: its
label numbers with commas between them, a space, and index:value pairs. Both count from 0; a sample
without labels begins with the space.
"""

import io
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.data.svmlight import content_of, features_fault, shown

_VALID_HEADER = "'16105 500 983' (the numbers of samples, features and labels)"
_VALID_LINE = "'12,40 3:0.5 7:1.25' (labels, then index:value with rising indices, all from 0)"


class Header(NamedTuple):
    """What the first line of a file says of it."""

    num_samples: int
    num_features: int
    num_labels: int


@dataclass(frozen=True, eq=False)
class MultiLabelFile:
    """A parsed file: scipy's CSR features in float32, and a bool for each sample and label."""

    path: Path
    features: Any
    labels: NDArray[np.bool_]


def parse_multilabel(path: Path) -> MultiLabelFile:
    """Parse a file; InvalidInput names the line of the first fault."""
    from sklearn.datasets import load_svmlight_file

    lines = [line.rstrip(b"\r") for line in content_of(path).split(b"\n")]
    if not lines[-1]:
        del lines[-1]  # the last line's end
    header = _header(path, lines)
    parts = [line.partition(b" ") for line in lines[1:]]
    if any(b"#" in line for line in lines):  # the rest of the line would be dropped as a comment
        _raise_first_fault(path, lines, header)
    text = b"".join(b"0 %s\n" % features for _, _, features in parts)
    try:
        features, _ = load_svmlight_file(
            io.BytesIO(text), n_features=header.num_features, dtype=np.float32, zero_based=True
        )
        labels = _labels([label for label, _, _ in parts], header)
    except (ValueError, OverflowError) as error:
        _raise_first_fault(path, lines, header)
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if b"qid" in text or not np.isfinite(features.data).all():
        _raise_first_fault(path, lines, header)
    return MultiLabelFile(path, features, labels)


def _header(path: Path, lines: list[bytes]) -> Header:
    words = lines[0].split() if lines else []
    if len(words) != len(Header._fields) or not all(map(_is_number, words)):
        raise InvalidInput(
            f"{path}, line 1: {shown(b' '.join(words))} is not a header; a valid one: "
            f"{_VALID_HEADER}"
        )
    header = Header(*map(int, words))
    if min(header) < 1:
        raise InvalidInput(f"{path}, line 1: each number must be at least 1, not {min(header)}")
    if len(lines) - 1 != header.num_samples:
        raise InvalidInput(
            f"{path} has {len(lines) - 1} samples, but its header says {header.num_samples}"
        )
    return header


def _labels(texts: list[bytes], header: Header) -> NDArray[np.bool_]:
    """Return a bool for each sample and label; ValueError if a label is none."""
    words = [text.split(b",") if text else [] for text in texts]
    numbers = list(chain.from_iterable(words))
    if not all(map(_is_number, numbers)):
        raise ValueError("a label is not a number")
    rows = np.repeat(np.arange(len(words)), [len(of_sample) for of_sample in words])
    columns = np.array(list(map(int, numbers)), dtype=np.int64)
    if len(columns) and columns.max() >= header.num_labels:
        raise ValueError("a label is too high")
    labels = np.zeros((len(words), header.num_labels), dtype=np.bool_)
    labels[rows, columns] = True
    if labels.sum() != len(columns):
        raise ValueError("a sample has a label twice")
    return labels


def _is_number(word: bytes) -> bool:
    return word.isdigit() and len(word) < 10


def _raise_first_fault(path: Path, lines: list[bytes], header: Header) -> None:
    for number, line in enumerate(lines[1:], start=2):
        label, _, features = line.partition(b" ")
        fault = _labels_fault(label, header.num_labels) or features_fault(
            features.split(), limit=header.num_features
        )
        if fault:
            raise InvalidInput(f"{path}, line {number}: {fault}; a valid line: {_VALID_LINE}")


def _labels_fault(text: bytes, num_labels: int) -> str | None:
    words = text.split(b",") if text else []
    for position, word in enumerate(words):
        if not _is_number(word):
            return f"the label {shown(word)} is not a number"
        if int(word) >= num_labels:
            return f"the label {int(word)} is not from 0 to {num_labels - 1}"
        if word in words[:position]:
            return f"the label {int(word)} stands there twice"
    return None
