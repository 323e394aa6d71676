"""What a parser is to the fuzzer: its seeds, how they are changed, and how an input is parsed."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzzing.changes import Changes, several
from paceline.core.errors import PacelineError

_LONGEST = 4100  # characters of a line
# A process imports only what its own parser needs.
_MODULES = {
    "fuzzing.records": (
        *("machine", "configuration", "option", "result", "trace", "report", "compare", "journal"),
    ),
    "fuzzing.tensors": (
        *("libsvm", "packed libsvm", "images", "tokens"),
        *("checkpoint", "checkpoint values"),
    ),
    "fuzzing.wire": ("frame", "record", "part"),
}
FRAMES = _MODULES["fuzzing.wire"]
NAMES = tuple(name for names in _MODULES.values() for name in names)


@dataclass(frozen=True)
class Parser:
    """A parser of files, or of frames and records in memory.

    `seeds` returns valid inputs, made in a folder by the real writers. `parse` takes an input and a
    folder to write it in; it returns a validated object, or raises one of the project's errors.
    `weight` is its part of the files, or of the frames.
    """

    name: str
    weight: float
    seeds: Callable[[Path], list[bytes]]
    changes: Changes
    parse: Callable[[bytes, Path], object]

    def inputs(self, seeds: Sequence[bytes]) -> SearchStrategy[bytes]:
        """Return the strategy of changed inputs."""
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


def parser_of(name: str) -> Parser:
    """Return the parser of a name."""
    module = next(module for module, names in _MODULES.items() if name in names)
    return {one.name: one for one in import_module(module).PARSERS}[name]
