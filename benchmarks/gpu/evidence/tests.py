"""The tests that need a GPU, and the outcome of each."""

import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from part import Part, PartFailedError

_ROOT = Path(__file__).parents[3]
_TESTS = _ROOT / "tests" / "gpu"
_TIMED = _TESTS / "test_gpu.py"  # times that other processes on the GPU would change
_PROCESSES = "8"
_MANY = "test_codecs.py"  # hundreds of small ones: last, where the deadline may come before the end
_MOST_SAID = 2000  # characters
_KEPT_EVERY_S = 5.0


class _Outcomes:
    """Keeps what pytest reports of each test, as soon as it does."""

    def __init__(self, part: Part) -> None:
        self._part, self._kept_s = part, time.monotonic()
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's outcome."""
        if report.when == "call" or report.outcome != "passed":
            found = {"outcome": report.outcome, "seconds": report.duration}
            why = report.longreprtext[-_MOST_SAID:]
            self.tests[report.nodeid] = found | ({"why": why} if why else {})
            if time.monotonic() > self._kept_s + _KEPT_EVERY_S:
                self.keep()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be collected, or skips all of its tests."""
        if report.outcome != "passed":
            why = report.longreprtext[-_MOST_SAID:]
            self.tests[report.nodeid] = {"outcome": report.outcome, "seconds": 0.0, "why": why}

    def keep(self) -> None:
        """Have the part keep what is known so far."""
        counts = Counter(one["outcome"] for one in self.tests.values())
        line = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        self._part.keep("tests", self.tests, line)
        self._kept_s = time.monotonic()


def run(part: Part) -> None:
    """Run them: first those that time the GPU, alone, then the others, several at once."""
    outcomes = _Outcomes(part)
    at_once = [] if part.smoke or find_spec("xdist") is None else ["--numprocesses", _PROCESSES]
    usual = ["--rootdir", str(_ROOT), "-c", str(_ROOT / "pyproject.toml")]
    # pytest-benchmark, where it is installed, warns of several at once, and warnings are errors.
    usual += ["-p", "no:cacheprovider", "-p", "no:benchmark", "-q"]
    others = sorted(
        set(_TESTS.glob("test_*.py")) - {_TIMED}, key=lambda path: (path.name == _MANY, path)
    )
    codes = [
        pytest.main([*usual, str(_TIMED)], [outcomes]),
        pytest.main([*usual, *at_once, *map(str, others)], [outcomes]),
    ]
    outcomes.keep()
    if any(codes):
        raise PartFailedError(f"pytest ended with {', '.join(str(int(one)) for one in codes)}")
