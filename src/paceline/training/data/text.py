"""Load token data sets: text as bytes, and arrays of token ids.

Samples are consecutive windows of a token sequence. The sequence is in memory or in a memory-mapped
file, and a window is read when a batch needs it.

The test tokens of a folder come from one in twenty files, chosen by hashes of the files' paths. Of
these files together, only the first 128 Ki tokens (131,072) are used. The test tokens of a single
file or array are the last twentieth of its tokens, but at most 128 Ki tokens.
"""

import os
import re
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput, first_line
from paceline.training.data.dataset import (
    Dataset,
    IndexedSamples,
    Pair,
    Shape,
    require_nbytes,
    shape_text,
)

Tokens = NDArray[np.integer[Any]]
IGNORED = -100  # ignore_index of torch.nn.functional.cross_entropy
_MASKED_SHARE = 0.15
_KEPT, _RANDOM = 0.1, 0.1  # shares of masked positions that keep their token or get a random one
_LENGTH = 256
_BYTES = 256  # vocabulary size of text: the number of byte values
_TEST_SHARE = 20  # one in twenty files or tokens is for testing
_MOST_TESTED = 128 * 1024
# Folders of Python's standard library to skip; some distributions lack the "test" folders.
_NOT_LIBRARY = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
)
_TOKENS = re.compile("(.+?)(?:,vocabulary=([1-9][0-9]{0,8}))?", re.DOTALL)
# Errors of numpy for a broken .npy file; some come from parsing its header as a Python literal.
_BROKEN = (
    *(ValueError, EOFError, OverflowError, OSError, SyntaxError, TokenError, TypeError),
    *(RecursionError, MemoryError, LookupError),
)
_FORM = "use tokens:PATH, where PATH is a one-dimensional .npy file of integers"


@dataclass(frozen=True, eq=False)
class TokenWindows(IndexedSamples):
    """Windows of `length` tokens; the target at each position is the next token.

    Inputs and targets are int64 (length,). `tokens` (N,): integers from 0 to `vocabulary` - 1;
    reading a token outside of this range raises InvalidInput. `source`: the file's path in errors.
    """

    tokens: Tokens
    length: int
    vocabulary: int
    source: str

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        found = self._gather(indices, self.length + 1)  # (len(indices), length + 1)
        inputs, targets = (np.ascontiguousarray(part) for part in (found[:, :-1], found[:, 1:]))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _gather(self, indices: Sequence[int], width: int) -> NDArray[np.int64]:
        """Return windows of `width` tokens as rows; window `i` starts at token `i * length`."""
        rows, count = np.asarray(indices, dtype=np.int64), len(self)
        if rows.size and not (-count <= rows.min() and rows.max() < count):
            raise IndexError(f"{self.source} has {count} samples (got indices {rows.tolist()})")
        places = (rows % max(1, count))[:, None] * self.length + np.arange(width)
        found: NDArray[np.int64] = self.tokens[places].astype(np.int64)
        is_wrong = (found < 0) | (found >= self.vocabulary)
        if is_wrong.any():
            problem = f"must have token ids from 0 to {self.vocabulary - 1}"
            raise InvalidInput(self.source, problem, got=int(found[is_wrong][0]))
        return found


@dataclass(frozen=True, eq=False)
class MaskedTokens(TokenWindows):
    """Windows of `length` tokens, some masked; targets are the original tokens.

    In each window, 15 % of the positions are masked, but at least one. Eight in ten masked
    positions get the mask token `vocabulary`, one in ten gets a random token, and one in ten keeps
    its token (Devlin et al. 2018, section 3.1). At positions that are not masked, the target is
    -100. `seed` and the sample's index determine the masked positions.
    """

    seed: int

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        inputs = self._gather(indices, self.length)  # (len(indices), length)
        targets = np.full_like(inputs, IGNORED)
        for row, index in enumerate(np.asarray(indices, dtype=np.int64) % max(1, len(self))):
            places, replaced = self._masked(int(index), inputs[row])
            targets[row, places] = inputs[row, places]
            inputs[row, places] = replaced
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _masked(
        self, index: int, window: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the masked positions (M,) of a window, and their new tokens (M,)."""
        count = max(1, round(_MASKED_SHARE * self.length))
        # numpy guarantees that raw PCG64 output never changes, unlike its random distributions.
        bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(index,)))
        places = np.argsort(bits.random_raw(self.length), kind="stable")[:count]
        draws = bits.random_raw(count) / 2.0**64
        random = (bits.random_raw(count) % self.vocabulary).astype(np.int64)
        unmasked = np.where(draws < _KEPT, window[places], random)
        return places, np.where(draws < _KEPT + _RANDOM, unmasked, self.vocabulary)


def load_text(path: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Load windows of bytes from a file, a folder, or Python's standard library.

    An empty `path` selects the running interpreter's standard library. `sample_shape` (T,): tokens
    per window, 256 by default. Raises InvalidInput for an unreadable path or too little text.
    """
    length = _length(sample_shape, "text")
    parts, source = _bytes_of(path)
    train, test = (TokenWindows(part, length, _BYTES, source) for part in parts)
    return _dataset(f"text:{path}" if path else "text", train, test, _BYTES)


def load_masked_text(path: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Load windows of bytes as `load_text` does, with some bytes masked by token 256 (BERT)."""
    length = _length(sample_shape, "masked-text")
    parts, source = _bytes_of(path)
    train, test = (MaskedTokens(part, length, _BYTES, source, seed) for part in parts)
    return _dataset(f"masked-text:{path}" if path else "masked-text", train, test, _BYTES + 1)


def load_tokens(argument: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Load windows of token ids from the file PATH, a one-dimensional .npy array of integers.

    `argument`: PATH, or "PATH,vocabulary=50257". The file is memory-mapped. Without a vocabulary
    size, the file is read once to find its largest id. Raises InvalidInput for an unusable file.
    """
    length = _length(sample_shape, "tokens")
    match = _TOKENS.fullmatch(argument)
    assert match is not None  # matches every nonempty text, and `load` passes no empty text
    path, given = match.groups()
    tokens = _mapped(path)
    vocabulary = int(given) if given else _vocabulary_of(tokens, path)
    train, test = (TokenWindows(part, length, vocabulary, path) for part in _ends_apart(tokens))
    return _dataset(f"tokens:{path}", train, test, vocabulary)


def _length(sample_shape: Shape | None, name: str) -> int:
    if sample_shape is None:
        return _LENGTH
    if len(sample_shape) != 1:
        problem, got = f"must be a number of tokens for data {name}", shape_text(sample_shape)
        raise InvalidInput("input_shape", problem, got=got, hint="use a language model here")
    return sample_shape[0]


def _dataset(name: str, train: TokenWindows, test: TokenWindows, num_classes: int) -> Dataset:
    for samples, use in ((train, "training"), (test, "testing")):
        if not len(samples):
            problem = f"has {len(samples.tokens):,} tokens for {use}, too few for a sample"
            hint = f"a sample has {samples.length} tokens; use a smaller input_shape or more data"
            raise InvalidInput(samples.source, problem, hint=hint)
    return Dataset(name, train, test, num_classes, (train.length,))


def _bytes_of(path: str) -> tuple[tuple[Tokens, Tokens], str]:
    """Return (training bytes, test bytes), and the path to be named in errors."""
    if not path:
        folder = Path(sysconfig.get_path("stdlib"))
        library = [file for file in _files(folder, _NOT_LIBRARY) if file.suffix == ".py"]
        return _split_by_file(folder, library), str(folder)
    if Path(path).is_dir():
        return _split_by_file(Path(path), _files(Path(path))), path
    if not Path(path).is_file():
        raise InvalidInput("data", "must name a file or folder", got=path)
    if not Path(path).stat().st_size:  # an empty file cannot be memory-mapped
        raise InvalidInput(path, "is empty")
    return _ends_apart(np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))), path


def _files(folder: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Return the sorted files below a folder, without files in folders with `skipped` names.

    Omits hidden files and folders, and does not follow links to folders. Raises OSError for an
    unreadable folder.
    """
    found: list[Path] = []

    def fail(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        found += [Path(root, name) for name in files if name[0] != "."]
    return sorted(file for file in found if file.is_file())


def _split_by_file(folder: Path, files: list[Path]) -> tuple[Tokens, Tokens]:
    """Choose the test files of a folder; return the bytes for training and for testing."""
    if len(files) < 2:
        problem = "must have at least two files, one of them for testing"
        hint = "add files, or use a single file"
        raise InvalidInput(str(folder), problem, got=len(files), hint=hint)
    nbytes = sum(file.stat().st_size for file in files)
    require_nbytes(nbytes, str(folder), "the text", "use a smaller folder or a single file")

    def digest(file: Path) -> bytes:
        return sha256(os.fsencode(file.relative_to(folder).as_posix())).digest()

    # Order by hash, so that the test files come from all subfolders.
    tested = sorted(files, key=digest)[: -(-len(files) // _TEST_SHARE)]
    trained = sorted(set(files).difference(tested))
    return _joined(trained), _joined(tested)[:_MOST_TESTED]


def _joined(files: list[Path]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def _ends_apart(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Split tokens into the beginning, for training, and the end, for testing."""
    start = len(tokens) - min(len(tokens) // _TEST_SHARE, _MOST_TESTED)
    return tokens[:start], tokens[start:]


def _mapped(path: str) -> Tokens:
    if not Path(path).is_file():
        raise InvalidInput("data", "must name a file", got=path, hint=_FORM)
    try:
        with warnings.catch_warnings():  # ignore numpy's warnings about headers of old versions
            warnings.simplefilter("ignore")
            found = np.lib.format.open_memmap(path, mode="r")  # refuses pickles and .npz archives
    except _BROKEN as error:
        raise InvalidInput(path, f"cannot be read: {first_line(error)}", hint=_FORM) from error
    if found.ndim != 1 or found.dtype.kind not in "iu":
        kind = f"{found.ndim} dimensions of {found.dtype}"
        raise InvalidInput(path, "must be a one-dimensional array of integers", got=kind)
    return np.asarray(found)


def _vocabulary_of(tokens: Tokens, path: str) -> int:
    """Return the largest token id plus one; raise InvalidInput for a negative id."""
    if not len(tokens):
        return 0
    if tokens.min() < 0:
        raise InvalidInput(path, "must have token ids of at least 0", got=int(tokens.min()))
    return int(tokens.max()) + 1
