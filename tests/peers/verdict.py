"""Compare the outcomes of tests with the expected ones, and print the table of these."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from expected import EXPECTED, NEVER_RUN, Entry, NotApplicable, Refused, entries
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
    seconds: float = 0.0


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


def table() -> str:
    """Return the table of the expected outcomes, and its notes, as Markdown."""
    notes: list[str] = []
    tests = (*ddp_tests(), WITHOUT_HOOKS)
    rows = [[f"`{test}`", *(_cell(name, test, notes) for name in EXPECTED)] for test in tests]
    head = ["test", *EXPECTED]
    lines = [_row(head), _row(["---"] * len(head)), *map(_row, rows), ""]
    return "\n".join(lines + [f"{number}. {note}" for number, note in enumerate(notes, 1)]) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(exchange: str, test: str, notes: list[str]) -> str:
    if test not in tests_for(exchange):
        return "not run"
    entry = entries(exchange).get(test)
    if entry is None:
        return "passed"
    note = _note(entry)
    if note not in notes:
        notes.append(note)
    word = "refused" if isinstance(entry, Refused) else "not applicable"
    return f"{word} ({notes.index(note) + 1})"


def _note(entry: Entry) -> str:
    if isinstance(entry, NotApplicable):
        return f"`{entry.at}`: {entry.why}"
    return f"`{entry.pattern}`"
