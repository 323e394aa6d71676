"""Run torch's tests of DistributedDataParallel with Paceline's class on two ranks.

They catch wrong values, lost calls, errors that differ from DDP's, crashes and hangs. The failing
tests must be exactly those of expected.py.
"""

from pathlib import Path

import pytest
from expected import EXPECTED
from verdict import WORDS, Outcome, complaint, tests_for

import rank
from pair import RankFailed, Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# The number of tests that pass with torch's class on two CPU ranks; fewer means lost coverage.
NUM_REFERENCE = 77
START_S = 240.0  # deadline for importing torch's tests on a busy machine
TEST_S = 140.0  # deadline of a test, longer than the timeouts of two collectives


def outcome_of(pair: Ranks, exchange: str, test: str, folder: Path) -> Outcome:
    """Run a test on the ranks; after a crash or hang, the next call starts new ranks."""
    pair(rank.prepared, exchange, group=False, deadline_s=START_S)
    (folder / "barrier").mkdir(parents=True)  # torch's tests expect it
    try:
        found = pair(rank.outcome, exchange, test, folder, group=False, deadline_s=TEST_S)
    except RankFailed as failed:
        return Outcome(test, WORDS[-1], details=str(failed))
    # If both ranks raised, report the first error, which may have caused the second.
    worst = max(found, key=lambda one: (WORDS.index(one["outcome"]), -one.pop("at_s", 0.0)))
    return Outcome(test, **worst)


@pytest.mark.parametrize("exchange", EXPECTED)
def test_torchs_tests_pass_or_end_as_expected(exchange: str, tmp_path: Path) -> None:
    tests, pair = tests_for(exchange), Ranks(2)
    try:
        outcomes = [outcome_of(pair, exchange, test, tmp_path / test) for test in tests]
    finally:
        pair.close()
    complaints = [line for one in outcomes if (line := complaint(exchange, one))]
    assert not complaints, "\n".join(complaints)
    assert len(outcomes) >= NUM_REFERENCE
