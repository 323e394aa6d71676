"""Compare the outcomes of tests with the expected outcomes."""

import re
from dataclasses import dataclass

from expected import NEVER_RUN, Entry, Refused, entries
from listed import WITHOUT_HOOKS, ddp_tests

# From best to worst; the outcome of a pair is that of its worst rank.
WORDS = ("passed", "skipped", "raised", "hung or crashed")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test on a pair of ranks."""

    test: str
    outcome: str
    error: str = ""
    statements: str = ""  # statements of torch's tests in the traceback
    details: str = ""  # a traceback, or the output of ranks that did not answer


def tests_for(exchange: str) -> list[str]:
    """Return the tests to run; with our exchanges, those that pass with torch's class."""
    left_out = {*NEVER_RUN, *(() if exchange == "ddp" else entries("ddp"))}
    return [test for test in (*ddp_tests(), WITHOUT_HOOKS) if test not in left_out]


def complaint(exchange: str, outcome: Outcome) -> str:
    """Describe how an outcome differs from the expected one; "" if it does not."""
    entry = entries(exchange).get(outcome.test)
    if outcome.outcome == "passed":
        return f"{outcome.test} passes now: remove it from expected.py" if entry else ""
    if entry and outcome.outcome == "raised" and _is_expected(entry, outcome):
        return ""
    expected = f"expected: {entry}\n" if entry else ""
    return f"{outcome.test} {outcome.outcome}: {outcome.error}\n{expected}{outcome.details}"


def _is_expected(entry: Entry, outcome: Outcome) -> bool:
    if isinstance(entry, Refused):
        return bool(re.search(entry.pattern, outcome.error))
    return entry.at in outcome.statements
