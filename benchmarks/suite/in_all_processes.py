"""Coverage in every process of a test run, with the test that started it as the context.

`main.py measure` installs this module with a line in a .pth file of the environment, so that each
Python process begins with it. Forked processes start a measurement of their own.
"""

import os
from pathlib import Path
from typing import Any

FOLDER = "PACELINE_COVERAGE"  # of the data files, in the environment
TEST = "PACELINE_COVERAGE_TEST"
_current: Any = None
_exit, _chdir = os._exit, os.chdir


def begin() -> None:
    """Measure this process from now on."""
    global _current
    import coverage

    _current = coverage.Coverage(
        data_file=str(Path(os.environ.get(FOLDER, _FOLDER)) / "data"),
        data_suffix=True,
        source_pkgs=["paceline"],
        config_file=False,
        messages=False,
    )
    for name in ("no_data", "unimported_source", "preimported_source"):
        setattr(_current, f"_warn_{name}", False)
    _current._auto_save = True
    _current.start()
    take_context()


def take_context() -> None:
    """Attribute the lines from now on to the test that the environment names."""
    _current.switch_context(os.environ.get(TEST, ""))


def _after_fork() -> None:
    _current._auto_save = False  # or the parent's lines would be saved again
    _current.stop()
    begin()


def _save_and_exit(status: int) -> None:
    _current.stop()
    _current.save()
    _exit(status)


def _enter(folder: Any) -> None:
    """Change the folder: what the fork server does once it has the environment of a process."""
    _chdir(folder)
    take_context()


_FOLDER = os.environ.get(FOLDER, "")
if _FOLDER:
    begin()
    os.register_at_fork(after_in_child=_after_fork)
    os._exit, os.chdir = _save_and_exit, _enter  # type: ignore[assignment]
