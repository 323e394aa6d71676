"""The four data sets of Ma, Rusu et al. 2020 (their table II), from files in a user's folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Dataset, TensorSamples, require_memory, shape_text
from paceline.data.libsvm import dataset_of, dense
from paceline.data.multilabel import MultiLabelFile, parse_multilabel
from paceline.data.sampler import shuffled
from paceline.data.svmlight import File, content_of, parse


@dataclass(frozen=True)
class Published:
    """What is known of a data set: its files, and what must be in them.

    Any of `names` will do, as it is or packed with bzip2. `test` names the file of the test
    samples, where there is one. `counts` are the samples of each file, and `labels` what stands in
    them; None if a sample may have several.
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


_COVTYPE_FILES = ("covtype.libsvm.binary.scale", "covtype.libsvm.binary")
_DELICIOUS_FILES = ("Delicious_data.txt", "delicious_data.txt")
PUBLISHED = {
    "covtype": Published(_COVTYPE_FILES, (581_012,), 54, 2, (1, 2), is_scaled=True),
    "w8a": Published(("w8a",), (49_749, 14_951), 300, 2, (-1, 1), test="w8a.t"),
    "delicious": Published(_DELICIOUS_FILES, (16_105,), 500, 983, None),
    "real-sim": Published(("real-sim",), (72_309,), 20_958, 2, (-1, 1)),
}
_SPLIT_FILES = ("delicious_trSplit.txt", "delicious_tstSplit.txt")


def load_published(
    name: str, folder: str, sample_shape: tuple[int, ...] | None, seed: int
) -> Dataset:
    """Return a data set of `PUBLISHED` from its files in the folder, as dense float32 values.

    InvalidInput if a file is missing, is another one, has a bad line, or does not fit into memory.
    """
    known, root = PUBLISHED[name], Path(folder)
    if not root.is_dir():
        raise InvalidInput(f"there is no folder {root}: {name}:FOLDER needs one with {_of(known)}")
    check_shape(name, known, sample_shape)
    path = _found(root, known.names, name)
    if known.labels is None:
        return _load_delicious(name, known, path, seed)
    paths = [path] if known.test is None else [path, _found(root, (known.test,), name)]
    # Before minutes of parsing, and by the number that the file must have.
    require_memory(known.num_samples, (known.num_features,), name)
    files = parse(paths)
    for file, count in zip(files, known.counts, strict=True):
        _check(file.path, file.features, count, known)
        _check_labels(file, known.labels)
    if not known.is_scaled:
        return dataset_of(name, files, None, seed)
    low, span = _range(files[0].features)
    return dataset_of(name, files, None, seed, lambda values: values.sub_(low).div_(span))


def check_shape(name: str, known: Published, sample_shape: tuple[int, ...] | None) -> None:
    """Raise InvalidInput unless the model takes samples of this data set, or says nothing."""
    if sample_shape not in (None, (known.num_features,)):
        assert sample_shape is not None
        raise InvalidInput(
            f"the samples of {name} have {known.num_features} values, "
            f"but the model takes {shape_text(sample_shape)}"
        )


def _of(known: Published) -> str:
    files = " or ".join(known.names)
    return f"{files}, and {known.test}" if known.test else files


def _found(root: Path, names: Sequence[str], of: str) -> Path:
    candidates = [root / f"{name}{suffix}" for name in names for suffix in ("", ".bz2")]
    for path in candidates:
        if path.is_file():
            return path
    wanted = ", ".join(path.name for path in candidates)
    raise InvalidInput(f"{of}: {root} has none of the files {wanted}; nothing is downloaded")


def _check(path: Path, features: Any, num_samples: int, known: Published) -> None:
    found, right = features.shape, (num_samples, known.num_features)
    if found != right:
        raise InvalidInput(
            f"{path} is another file: it has {found[0]:,} samples of {found[1]:,} features, "
            f"not {right[0]:,} of {right[1]:,}"
        )


def _check_labels(file: File, labels: tuple[int, ...]) -> None:
    found = np.unique(file.labels)
    if not np.array_equal(found, labels):
        listed = ", ".join(f"{label:g}" for label in found[:8])
        raise InvalidInput(
            f"{file.path} is another file: its labels are {listed}, "
            f"not {' and '.join(map(str, labels))}"
        )


def _range(features: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least value of each feature, and the difference to the greatest (1 if none)."""
    least, greatest = (part.toarray()[0] for part in (features.min(axis=0), features.max(axis=0)))
    span = np.where(greatest > least, greatest - least, np.float32(1))
    return torch.from_numpy(least), torch.from_numpy(span)


def _load_delicious(name: str, known: Published, path: Path, seed: int) -> Dataset:
    file = parse_multilabel(path)
    _check(path, file.features, known.num_samples, known)
    if file.labels.shape[1] != known.num_classes:
        raise InvalidInput(
            f"{path} is another file: it has {file.labels.shape[1]} labels, not {known.num_classes}"
        )
    require_memory(known.num_samples, (known.num_features,), name)
    train, test = (_samples(file, rows) for rows in _delicious_split(path, known, seed))
    return Dataset(name, train, test, known.num_classes, (known.num_features,))


def _samples(file: MultiLabelFile, rows: NDArray[np.int64]) -> TensorSamples:
    features = dense(file.features[rows], (file.features.shape[1],))
    return TensorSamples(features, torch.from_numpy(file.labels[rows]))


def _delicious_split(
    path: Path, known: Published, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the repository's first split if its files are there, else a fifth for testing."""
    files = [path.with_name(name) for name in _SPLIT_FILES]
    if not any(file.exists() for file in files):
        order = shuffled(known.num_samples, seed, epoch=0)
        num_test = known.num_samples // 5
        return np.sort(order[num_test:]), np.sort(order[:num_test])
    train, test = (_first_column(file) for file in files)
    rows = np.sort(np.concatenate([train, test]))
    if not np.array_equal(rows, np.arange(known.num_samples)):
        raise InvalidInput(
            f"{files[0]} and {files[1].name} do not name each of the samples 1 to "
            f"{known.num_samples} once in their first columns"
        )
    return train, test


def _first_column(path: Path) -> NDArray[np.int64]:
    """Return the first number of each line, less 1: the repository counts samples from 1."""
    if not path.exists():
        raise InvalidInput(f"{path} is missing: the files of a split go together")
    numbers = []
    for number, line in enumerate(content_of(path).splitlines(), start=1):
        word = (line.split() or [b""])[0]
        if not (word.isdigit() and len(word) < 10):
            raise InvalidInput(f"{path}, line {number}: does not begin with a number")
        numbers.append(int(word) - 1)
    return np.array(numbers, dtype=np.int64)
