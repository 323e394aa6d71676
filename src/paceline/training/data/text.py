"""Load token data sets: text as bytes, and arrays of token ids.

One in twenty files, chosen by a hash of its path, is for testing; of a single file or array it is
the last twentieth. At most 128 Ki tokens are tested; further files chosen for testing are not
trained on either.
"""

import os
import re
import sysconfig
import warnings
from hashlib import sha256
from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput, first_line
from paceline.training.data.dataset import Dataset, Shape, require_nbytes, shape_text
from paceline.training.data.windows import MaskedTokens, Tokens, TokenWindows

_LENGTH = 256
_BYTES = 256  # number of different bytes
_TEST_SHARE = 20  # one in so many files is for testing
_MOST_TESTED = 128 * 1024
_BLOCK = 1 << 24  # tokens
# Exclude installed packages and tests, which some Python distributions omit.
_NOT_LIBRARY = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
)
_TOKENS = re.compile("(.+?)(?:,vocabulary=([1-9][0-9]{0,8}))?", re.DOTALL)
# Errors of numpy, which parses a header as Python literals.
_BROKEN = (
    *(ValueError, EOFError, OverflowError, OSError, SyntaxError, TokenError, TypeError),
    *(RecursionError, MemoryError, LookupError),
)
_FORM = "right would be a .npy file with one dimension of integers, as tokens:PATH"


def load_text(path: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Load byte windows of a file, of a folder, or of Python's standard library.

    An empty `path` selects the source text of the running interpreter's standard library.
    `sample_shape` (T,): tokens per window, 256 by default. The split does not depend on the seed.
    Raises InvalidInput for an unreadable path or too little text.
    """
    length = _length(sample_shape, "text")
    parts, source = _bytes_of(path)
    train, test = (TokenWindows(part, length, _BYTES, source) for part in parts)
    return _dataset(f"text:{path}" if path else "text", train, test, _BYTES)


def load_masked_text(path: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Load the windows of `load_text` with some bytes masked, as for BERT.

    The additional token 256 is the mask.
    """
    length = _length(sample_shape, "masked-text")
    parts, source = _bytes_of(path)
    train, test = (MaskedTokens(part, length, _BYTES, source, seed) for part in parts)
    return _dataset(f"masked-text:{path}" if path else "masked-text", train, test, _BYTES + 1)


def load_tokens(argument: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Load windows of token ids from PATH or "PATH,vocabulary=50257".

    The file is a one-dimensional .npy array of integers, which is memory-mapped. Without a
    vocabulary it is read once for its largest id. Raises InvalidInput for another file type, a
    negative id, or too few tokens.
    """
    length = _length(sample_shape, "tokens")
    match = _TOKENS.fullmatch(argument)
    assert match is not None  # the path is not empty
    path, given = match.groups()
    tokens = _mapped(path)
    vocabulary = int(given) if given else _vocabulary_of(tokens, path)
    train, test = (TokenWindows(part, length, vocabulary, path) for part in _ends_apart(tokens))
    return _dataset(f"tokens:{path}", train, test, vocabulary)


def _length(sample_shape: Shape | None, name: str) -> int:
    if sample_shape is None:
        return _LENGTH
    if len(sample_shape) != 1:
        raise InvalidInput(
            "input_shape",
            f"{name} cannot have the sample shape {shape_text(sample_shape)}: right would be one "
            f"number of tokens, such as {_LENGTH}",
        )
    return sample_shape[0]


def _dataset(
    name: str,
    train: TokenWindows | MaskedTokens,
    test: TokenWindows | MaskedTokens,
    num_classes: int,
) -> Dataset:
    for samples, use in ((train, "training"), (test, "testing")):
        if not len(samples):
            raise InvalidInput(
                samples.source,
                f"{len(samples.tokens):,} tokens for {use} are too few for one sample of "
                f"{samples.length}",
                hint="give more, or take shorter samples",
            )
    return Dataset(name, train, test, num_classes, (train.length,))


def _bytes_of(path: str) -> tuple[tuple[Tokens, Tokens], str]:
    """Return training bytes, test bytes, and their name in errors."""
    if not path:
        folder = Path(sysconfig.get_path("stdlib"))
        library = [file for file in _files(folder, _NOT_LIBRARY) if file.suffix == ".py"]
        return _split_by_file(folder, library), str(folder)
    if Path(path).is_dir():
        return _split_by_file(Path(path), _files(Path(path))), path
    if not Path(path).is_file():
        raise InvalidInput("data", f"there is no file or folder {path}")
    if not Path(path).stat().st_size:  # an empty file cannot be memory-mapped
        raise InvalidInput(str(path), "is empty: right would be a file of text")
    return _ends_apart(np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))), path


def _files(folder: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Return all files below a folder, sorted, without hidden files and `skipped` folders.

    Does not follow links to folders. Raises OSError for an unreadable folder.
    """
    found: list[Path] = []

    def fail(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        found += [Path(root, name) for name in files if name[0] != "."]
    return sorted(file for file in found if file.is_file())


def _split_by_file(folder: Path, files: list[Path]) -> tuple[Tokens, Tokens]:
    """Return the bytes of the training files and of the test files, in order."""
    if len(files) < 2:
        raise InvalidInput(
            str(folder),
            f"{len(files)} files of text cannot be split for training and testing",
            hint="give more, or the path of one",
        )
    nbytes = sum(file.stat().st_size for file in files)
    require_nbytes(nbytes, str(folder), "the text", "name a folder with less, or one file")

    def digest(file: Path) -> bytes:
        return sha256(os.fsencode(file.relative_to(folder).as_posix())).digest()

    # Ordered by hash, so that files within the limit come from the whole folder.
    tested = sorted(files, key=digest)[: -(-len(files) // _TEST_SHARE)]
    trained = sorted(set(files).difference(tested))
    return _joined(trained), _joined(tested)[:_MOST_TESTED]


def _joined(files: list[Path]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def _ends_apart(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Split tokens into the beginning, for training, and the end."""
    start = len(tokens) - min(len(tokens) // _TEST_SHARE, _MOST_TESTED)
    return tokens[:start], tokens[start:]


def _mapped(path: str) -> Tokens:
    if not Path(path).is_file():
        raise InvalidInput(
            "data", f"there is no file {path}: {_FORM} or tokens:PATH,vocabulary=50257"
        )
    try:
        with warnings.catch_warnings():  # headers of Python 2, and old type names
            warnings.simplefilter("ignore")
            found = np.lib.format.open_memmap(path, mode="r")  # reads neither pickles nor archives
    except _BROKEN as error:
        raise InvalidInput(str(path), f"cannot be used: {first_line(error)}", hint=_FORM) from error
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InvalidInput(str(path), f"has {found.ndim} dimensions of {found.dtype}: {_FORM}")
    return np.asarray(found)


def _vocabulary_of(tokens: Tokens, path: str) -> int:
    """Return the largest token id plus one; InvalidInput for a negative id."""
    highest = -1
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        if block.min() < 0:
            raise InvalidInput(
                str(path), f"has the token {block.min()}: tokens are the numbers from 0 up"
            )
        highest = max(highest, int(block.max()))
    return highest + 1
