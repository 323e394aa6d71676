"""One-line errors blame the user's code, full memory, a full disk, or Paceline."""

import errno
import sysconfig
from pathlib import Path

import pytest

from paceline.core.cost import Totals
from paceline.core.error_lines import blamed, error_line, place_of
from paceline.core.errors import InvalidInput, WorkerLost
from paceline.core.settings import Interval


class OutOfMemoryError(RuntimeError):  # named like torch's class
    pass


def fail(error: Exception) -> None:
    raise error


def raised(code, **names) -> Exception:
    """Run code as if from mine.py, and return its exception."""
    try:
        exec(compile(code, str(Path.cwd() / "mine.py"), "exec"), names)
    except Exception as error:
        return error
    raise AssertionError("no exception")


MEMORY = ["out of memory", "--batch-size"]


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (InvalidInput("batch_size", "no"), ["batch_size: no"]),
        (WorkerLost("worker 1 ended"), ["worker 1 ended"]),
        (raised("x = 1\nraise ValueError('no such mode')"), ["ValueError: no such", "mine.py:2"]),
        (OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), [*MEMORY, "Tried 2 GiB"]),
        (
            raised("raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')"),
            [*MEMORY, "mine.py:1", "DefaultCPUAllocator"],
        ),
        (MemoryError(), MEMORY),
        (OSError(errno.ENOSPC, "No space", "report.html"), ["output: No space", "report.html"]),
        (KeyError("x"), ["internal error", "KeyError('x')", "--debug"]),
        (raised("raise SystemError('odd')"), ["SystemError: odd", "mine.py:1"]),
    ],
)
def test_one_line_names_the_error_and_its_source(error, parts):
    line = error_line(error, 1)
    assert [part for part in parts if part not in line] == []
    assert ("worker 1" in line) is not isinstance(error, InvalidInput)
    assert "\n" not in line


def test_the_last_line_of_user_code_is_blamed_unless_paceline_raised():
    assert place_of(raised("parse('3 parsecs')", parse=Interval.parse)) is None
    assert place_of(raised("Totals(1, 2, 3, 4, 5)", Totals=Totals)) == "mine.py:1"
    # For an error in a library, the line that called the library is blamed.
    assert place_of(raised("import json\njson.loads('{')")) == "mine.py:2"
    library = sysconfig.get_paths()["stdlib"]
    assert library not in str(place_of(raised("fail(error)", fail=fail, error=ValueError("no"))))
    # Refusals name the line, too.
    assert "mine.py:2" in blamed(raised("\nraise ValueError('no such mode')"))
    assert blamed(KeyError("x")) == "KeyError: 'x'"
