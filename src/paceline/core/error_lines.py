"""Describe an error in one line: the user's file and line, out of memory, disk full.

    ValueError: no such mode (worker 1, at mine.py:12)
    worker 1 is out of memory at mine.py:12: CUDA out of memory. Tried to allocate 2.00 GiB ...
    output: no space left on device: runs/report.html (worker 0); free space, or ...

This module does not import torch: it recognises torch's errors by their class names and texts.
"""

import errno
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidInput, PacelineError, first_line

DEBUG = "PACELINE_DEBUG"  # environment variable: if set, processes print tracebacks
TYPED = "PACELINE_TYPED"  # environment variable: options that the user typed, such as "--steps"
FLAGS = {  # options whose name differs from the name of their setting
    "options": "--strategy-option",
    "optimizer_options": "--optimizer-option",
    "deadline_s": "--timeout",
    "wait_s": "--wait",
    "kinds": "--kind",
}
_PACELINE = str(Path(__file__).parents[1]) + os.sep
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    str(Path(_PATHS[name])) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_SCRIPTS = tuple(str(Path(path)) + os.sep for path in (_PATHS["scripts"], Path(sys.prefix) / "bin"))
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_FULL_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory")
_LESS_MEMORY = "try a smaller --batch-size, or --accumulate"


def error_line(error: BaseException, worker: str | int | None = None) -> str:
    """Describe an error in one line, with the worker that failed and the user's line of code."""
    if isinstance(error, InvalidInput):
        return _as_typed(error)
    if isinstance(error, PacelineError):
        return str(error)
    who = "this process" if worker is None else f"worker {worker}"
    place = place_of(error)
    at = "" if place is None else f" at {place}"
    if isinstance(error, SystemExit):
        return f"the model or its data called sys.exit({error}) in {who}{at}"
    if isinstance(error, OSError) and error.errno in _FULL:
        name = "" if error.filename is None else f": {error.filename}"
        return f"output: {error.strerror}{name} ({who}{at}); free space, or choose another --output"
    if _is_full_memory(error):
        return f"{who} is out of memory{at}: {first_line(error)}; {_LESS_MEMORY}"
    if place is not None:
        return f"{first_line(error)} ({who}{at})"
    where = "" if worker is None else f" in worker {worker}"
    return f"internal error{where}: {error!r} (--debug shows where)"


def flag_of(name: str) -> str:
    """Return the command-line option that sets a field of the settings."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def _as_typed(error: InvalidInput) -> str:
    """Return the error's message; name the option, not the field, if the user typed the option."""
    setting, _, key = error.field.partition(".")
    flag = flag_of(setting)
    is_typed = flag in os.environ.get(TYPED, "").split()
    return error.message_for(f"{flag} {key}".strip()) if is_typed else str(error)


def blamed(error: BaseException) -> str:
    """Return the error's type and first line, with the file and line if user code raised it.

    For example "ValueError: no such mode (at mine.py:12)".
    """
    place = place_of(error)
    return first_line(error) + ("" if place is None else f" (at {place})")


@contextmanager
def blaming(field: str, problem: str, **more: Any) -> Iterator[None]:
    """Turn an error that the block raises into InvalidInput, with `problem` and the error.

    `more`: other arguments of InvalidInput, such as `hint`.
    """
    try:
        yield
    except InvalidInput:
        raise
    except (Exception, SystemExit) as error:
        raise InvalidInput(field, f"{problem}: {blamed(error)}", **more) from error


def exit_code(error: BaseException) -> int:
    """Return exit code 2 for invalid input, otherwise 1."""
    return 2 if isinstance(error, InvalidInput) else 1


def place_of(error: BaseException) -> str | None:
    """Return FILE:LINE of the innermost user code in the error's traceback.

    Returns None if the traceback contains no user code, or if user code called Paceline, which
    raised the error.
    """
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if name.startswith(_PACELINE):
            found = None
        elif not name.startswith(("<", *_LIBRARIES, *_SCRIPTS)):
            found = f"{_from_here(name)}:{line}"
    return found


def _is_full_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and any(
        words in str(error) for words in _OF_FULL_MEMORY
    )


def _from_here(name: str) -> str:
    """Return a file's path, relative to the current folder if the file is below that folder."""
    path = Path(name)
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)
