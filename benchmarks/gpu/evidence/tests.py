"""Run the tests that need a GPU, and keep each outcome."""

import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from part import Part, PartFailedError

_ROOT = Path(__file__).parents[3]
_TESTS = _ROOT / "tests" / "gpu"
_TIMED = _TESTS / "test_gpu.py"  # runs alone: other processes on the GPU would change its timings
_PROCESSES = "8"
_MANY = "test_codecs.py"  # hundreds of small tests: run last, in case the deadline ends them
_MOST_SAID = 2000  # characters
_KEPT_EVERY_S = 5.0


class _Outcomes:
    """A pytest plugin that saves test outcomes during the run."""

    def __init__(self, part: Part) -> None:
        self._part, self._kept_s = part, time.monotonic()
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test's outcome."""
        if report.when == "call" or report.outcome != "passed":
            found = {"outcome": report.outcome, "seconds": report.duration}
            why = report.longreprtext[-_MOST_SAID:]
            self.tests[report.nodeid] = found | ({"why": why} if why else {})
            if time.monotonic() > self._kept_s + _KEPT_EVERY_S:
                self.keep()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be collected, or skips all of its tests."""
        if report.outcome != "passed":
            why = report.longreprtext[-_MOST_SAID:]
            self.tests[report.nodeid] = {"outcome": report.outcome, "seconds": 0.0, "why": why}

    def keep(self) -> None:
        """Save the outcomes so far."""
        counts = Counter(one["outcome"] for one in self.tests.values())
        line = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        self._part.keep("tests", self.tests, line)
        self._kept_s = time.monotonic()


def run(part: Part) -> None:
    """Run the GPU tests: first the timed tests alone, then the others in parallel."""
    outcomes = _Outcomes(part)
    at_once = [] if part.smoke or find_spec("xdist") is None else ["--numprocesses", _PROCESSES]
    usual = ["--rootdir", str(_ROOT), "-c", str(_ROOT / "pyproject.toml")]
    # pytest-benchmark, if installed, warns about parallel tests, and warnings are errors.
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
