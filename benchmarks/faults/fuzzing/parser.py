"""Describe a parser to the fuzzer: its valid inputs, their changes, and its parse function."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzzing.changes import Changes, several
from paceline.core.errors import PacelineError

_LONGEST = 4100  # characters of a clear error


@dataclass(frozen=True)
class Parser:
    """A parser of files, or of frames and records in memory.

    `seeds` returns valid inputs; it may write to the given folder. `parse` writes the input to a
    folder in it if necessary, and returns a validated object or raises a PacelineError. `weight` is
    the parser's relative share of the inputs of all files, or of all frames.
    """

    name: str
    weight: float
    seeds: Callable[[Path], list[bytes]]
    changes: Changes
    parse: Callable[[bytes, Path], object]

    def inputs(self, seeds: Sequence[bytes]) -> SearchStrategy[bytes]:
        """Return a Hypothesis strategy that draws changed inputs."""
        drawn = st.tuples(st.sampled_from(seeds), several(self.changes))
        return drawn.map(lambda pair: pair[1](pair[0]))

    def verdict(self, data: bytes, folder: Path) -> tuple[str, str]:
        """Return "accepted", "refused", "unclear" or "crashed", and the error's text."""
        try:
            found = self.parse(data, folder)
        except PacelineError as error:
            text = str(error)
            is_clear = 0 < len(text) <= _LONGEST and text.isprintable()
            return ("refused" if is_clear else "unclear"), text
        except Exception:
            return "crashed", traceback.format_exc()
        return ("unclear", "nothing came of it") if found is None else ("accepted", "")


def on_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """Return a parse function that writes the input to a file, and reads the file."""

    def parse(data: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return parse
