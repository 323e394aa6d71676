"""The four data sets of Ma, Rusu et al. 2020 (their table II), from files in a user's folder.

Delicious comes in the text format of the Extreme Classification Repository. The first line has the
numbers of samples, features and labels. Each further line is a sample: its label numbers with
commas between them, a space, and index:value pairs. Both count from 0; a sample without labels
begins with the space.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.training.data import libsvm
from paceline.training.data.dataset import Dataset, Shape, TensorSamples, require_memory, shape_text
from paceline.training.data.libsvm import SparseFile, quoted
from paceline.training.data.sampler import TEST_SHARE, shuffled

_VALID_LINE = "'12,40 3:0.5 7:1.25' (labels, then index:value with rising indices, all from 0)"
_COVTYPE_FILES = ("covtype.libsvm.binary.scale", "covtype.libsvm.binary")
_DELICIOUS_FILES = ("Delicious_data.txt", "delicious_data.txt")
_SPLIT_FILES = ("delicious_trSplit.txt", "delicious_tstSplit.txt")


def parse_multilabel(path: Path) -> SparseFile:
    """Parse a file; InvalidInput names the line of the first fault."""
    from sklearn.datasets import load_svmlight_file

    lines = [line.rstrip(b"\r") for line in libsvm.content_of(path).split(b"\n")]
    if not lines[-1]:
        del lines[-1]  # what follows the last line's end
    words = lines[0].split() if lines else []
    if len(words) != 3 or not all(map(_is_number, words)):
        raise InvalidInput(
            str(path),
            f"line 1: {quoted(b' '.join(words))} is not a header",
            hint="a valid one: '16105 500 983' (the numbers of samples, features and labels)",
        )
    num_samples, num_features, num_labels = header = tuple(map(int, words))
    if min(header) < 1:
        raise InvalidInput(str(path), f"line 1: each number must be at least 1, not {min(header)}")
    if len(lines) - 1 != num_samples:
        raise InvalidInput(
            str(path), f"has {len(lines) - 1} samples, but its header says {num_samples}"
        )
    nbytes = sum(map(len, lines))
    libsvm.require_proportion(
        num_samples * num_labels, nbytes, str(path), f"line 1: {num_labels:,} labels"
    )
    fault_of = partial(_fault, num_features, num_labels)
    check = partial(libsvm.raise_first_fault, path, lines[1:], fault_of, _VALID_LINE, first=2)
    if any(b"#" in line for line in lines):  # the rest of the line would be dropped as a comment
        check()
    parts = [line.partition(b" ") for line in lines[1:]]
    text = b"".join(b"0 %s\n" % features for _, _, features in parts)
    try:
        features, _ = load_svmlight_file(
            io.BytesIO(text), n_features=num_features, dtype=np.float32, zero_based=True
        )
        labels = _labels([label for label, _, _ in parts], num_labels)
    except (ValueError, OverflowError) as error:
        check()
        raise InvalidInput(str(path), f"cannot be read: {error}") from error
    if b"qid" in text or not np.isfinite(features.data).all():
        check()
    return SparseFile(path, features, labels, nbytes)


def _labels(texts: list[bytes], num_labels: int) -> NDArray[np.bool_]:
    """Return a bool for each sample and label; ValueError if a label is none."""
    words = [text.split(b",") if text else [] for text in texts]
    numbers = list(chain.from_iterable(words))
    if not all(map(_is_number, numbers)):
        raise ValueError("a label is not a number")
    rows = np.repeat(np.arange(len(words)), [len(of_sample) for of_sample in words])
    columns = np.array(list(map(int, numbers)), dtype=np.int64)
    if len(columns) and columns.max() >= num_labels:
        raise ValueError("a label is too high")
    labels = np.zeros((len(words), num_labels), dtype=np.bool_)
    labels[rows, columns] = True
    if labels.sum() != len(columns):
        raise ValueError("a sample has a label twice")
    return labels


def _is_number(word: bytes) -> bool:
    return word.isdigit() and len(word) < 10


def _fault(num_features: int, num_labels: int, line: bytes) -> str | None:
    text, _, features = line.partition(b" ")
    words = text.split(b",") if text else []
    for position, word in enumerate(words):
        if not _is_number(word):
            return f"the label {quoted(word)} is not a number"
        if int(word) >= num_labels:
            return f"the label {int(word)} is not from 0 to {num_labels - 1}"
        if word in words[:position]:
            return f"the label {int(word)} stands there twice"
    return libsvm.features_fault(features.split(), limit=num_features)


@dataclass(frozen=True)
class Published:
    """The files of a data set, and their expected contents.

    Any of `names` is accepted, plain or packed with bzip2. `test`: the file of the test samples,
    where there is one. `counts`: the number of samples in each file. `labels`: their labels, or
    None if a sample may have several.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    num_features: int
    num_classes: int
    labels: tuple[int, ...] | None
    test: str | None = None
    is_scaled: bool = False

    @property
    def num_samples(self) -> int:
        """Samples for training and for testing together: the examples of table II."""
        return sum(self.counts)


PUBLISHED = {
    "covtype": Published(_COVTYPE_FILES, (581_012,), 54, 2, (1, 2), is_scaled=True),
    "w8a": Published(("w8a",), (49_749, 14_951), 300, 2, (-1, 1), test="w8a.t"),
    "delicious": Published(_DELICIOUS_FILES, (16_105,), 500, 983, None),
    "real-sim": Published(("real-sim",), (72_309,), 20_958, 2, (-1, 1)),
}


def load_published(name: str, folder: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Return a data set of `PUBLISHED` from its files in the folder, as dense float32 values.

    InvalidInput if a file is missing, is another one, has a bad line, or does not fit into memory.
    """
    known, root = PUBLISHED[name], Path(folder)
    if not root.is_dir():
        needed = " or ".join(known.names) + (f", and {known.test}" if known.test else "")
        raise InvalidInput(
            "data", f"there is no folder {root}: {name}:FOLDER needs one with {needed}"
        )
    check_shape(name, known, sample_shape)
    shape = (known.num_features,)
    path = _find_file(root, known.names)
    if known.labels is None:
        file = parse_multilabel(path)
        _check_contents(file, known.num_samples, known)
        require_memory(known.num_samples, shape)
        train, test = (
            TensorSamples(
                libsvm.dense(file.features[rows], shape), torch.from_numpy(file.labels[rows])
            )
            for rows in _delicious_split(path, known, seed)
        )
        return Dataset(name, train, test, known.num_classes, shape)
    paths = [path] if known.test is None else [path, _find_file(root, (known.test,))]
    # Before minutes of parsing, and by the number that the file must have.
    require_memory(known.num_samples, shape)
    files = libsvm.parse(paths)
    for file, count in zip(files, known.counts, strict=True):
        _check_contents(file, count, known)
    if not known.is_scaled:
        return libsvm.dataset_of(name, files, None, seed)
    # To values from 0 to 1; of a feature with one value, that value becomes 0.
    features = files[0].features
    least, greatest = (part.toarray()[0] for part in (features.min(axis=0), features.max(axis=0)))
    span = torch.from_numpy(np.where(greatest > least, greatest - least, np.float32(1)))
    low = torch.from_numpy(least)
    return libsvm.dataset_of(name, files, None, seed, lambda values: values.sub_(low).div_(span))


def check_shape(name: str, known: Published, sample_shape: Shape | None) -> None:
    """Raise InvalidInput unless the model takes samples of this data set, or says nothing."""
    if sample_shape is not None and sample_shape != (known.num_features,):
        raise InvalidInput(
            "data",
            f"the samples of {name} have {known.num_features} values, but the model takes "
            f"{shape_text(sample_shape)}",
        )


def _find_file(root: Path, names: Sequence[str]) -> Path:
    candidates = [root / f"{name}{suffix}" for name in names for suffix in ("", ".bz2")]
    for path in candidates:
        if path.is_file():
            return path
    wanted = ", ".join(path.name for path in candidates)
    raise InvalidInput(
        "data", f"{root} has none of the files {wanted}", hint="nothing is downloaded"
    )


def _check_contents(file: SparseFile, num_samples: int, known: Published) -> None:
    """Raise InvalidInput if the file has other samples, features or labels than the published."""
    found, right = file.features.shape, (num_samples, known.num_features)
    if found != right:
        fault = (
            f"it has {found[0]:,} samples of {found[1]:,} features, "
            f"not {right[0]:,} of {right[1]:,}"
        )
    elif known.labels is None:
        if file.labels.shape[1] == known.num_classes:
            return
        fault = f"it has {file.labels.shape[1]} labels, not {known.num_classes}"
    else:
        labels = np.unique(file.labels)
        if np.array_equal(labels, known.labels):
            return
        listed = ", ".join(f"{label:g}" for label in labels[:8])
        fault = f"its labels are {listed}, not {' and '.join(map(str, known.labels))}"
    raise InvalidInput(str(file.path), f"is another file: {fault}")


def _delicious_split(
    path: Path, known: Published, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the repository's first split if its files are there, else a fifth for testing."""
    files = [path.with_name(name) for name in _SPLIT_FILES]
    if not any(file.exists() for file in files):
        order = shuffled(known.num_samples, seed, epoch=0)
        num_test = known.num_samples // TEST_SHARE
        return np.sort(order[num_test:]), np.sort(order[:num_test])
    parts = []
    for file in files:
        if not file.exists():
            raise InvalidInput(str(file), "is missing: the files of a split go together")
        numbers = []
        for number, line in enumerate(libsvm.content_of(file).splitlines(), start=1):
            word = (line.split() or [b""])[0]
            if not _is_number(word):
                raise InvalidInput(str(file), f"line {number}: does not begin with a number")
            numbers.append(int(word) - 1)  # the repository counts samples from 1
        parts.append(np.array(numbers, dtype=np.int64))
    train, test = parts
    rows = np.sort(np.concatenate([train, test]))
    if not np.array_equal(rows, np.arange(known.num_samples)):
        raise InvalidInput(
            str(files[0]),
            f"and {files[1].name} do not name each of the samples 1 to {known.num_samples} once "
            "in their first columns",
        )
    return train, test
