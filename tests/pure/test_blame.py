import errno
import sysconfig
from pathlib import Path

import pytest

from paceline.core.blame import blamed, place_of, told
from paceline.core.cost import Totals
from paceline.core.errors import InvalidInput, WorkerLost
from paceline.core.interval import Interval


class OutOfMemoryError(RuntimeError):  # as torch's is called
    pass


def raised(code, **names) -> Exception:
    """Run code that is in mine.py, and return what it raises."""
    try:
        exec(compile(code, str(Path.cwd() / "mine.py"), "exec"), names)
    except Exception as error:
        return error
    raise AssertionError("it raises nothing")


def failing(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InvalidInput("batch_size", "no"), "batch_size: no"),
        (WorkerLost("worker 1 ended"), "worker 1 ended"),
        (
            raised("x = 1\nraise ValueError('no such mode')"),
            "ValueError: no such mode (worker 1 at mine.py:2)",
        ),
        (
            raised("\n\nmake()", make=failing(OutOfMemoryError("CUDA out of memory. Tried 2 GiB"))),
            "worker 1 is out of memory at ",
        ),
        (
            raised("raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')"),
            "worker 1 is out of memory at mine.py:1: RuntimeError: DefaultCPUAllocator",
        ),
        (MemoryError(), "worker 1 is out of memory: MemoryError; a smaller --batch-size"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/report.html"),
            "output: No space left on device: runs/report.html (worker 1); make room",
        ),
        (KeyError("x"), "internal error in worker 1: KeyError('x') (--debug shows where)"),
        (raised("raise SystemError('odd')"), "SystemError: odd (worker 1 at mine.py:1"),
    ],
)
def test_one_line_says_what_failed_and_whose_it_was(error, line):
    assert told(error, 1).startswith(line)
    assert "\n" not in told(error, 1)


def test_a_fault_of_paceline_that_a_model_has_called_is_not_the_models():
    error = raised("parse('3 parsecs')", parse=Interval.parse)
    assert place_of(error) is None
    assert place_of(raised("Totals(1, 2, 3, 4, 5)", Totals=Totals)) == "mine.py:1"


def test_a_library_that_a_model_has_called_is_blamed_on_the_models_line():
    error = raised("import json\njson.loads('{')")
    assert place_of(error) == "mine.py:2"
    library = Path(sysconfig.get_paths()["stdlib"])
    elsewhere = failing(ValueError("no"))
    assert str(library) not in str(place_of(raised("f()", f=elsewhere)))


def test_what_is_refused_names_the_users_line_too():
    assert blamed(raised("\nraise ValueError('no such mode')")) == (
        "ValueError: no such mode (at mine.py:2)"
    )
    assert blamed(KeyError("x")) == "KeyError: 'x'"
