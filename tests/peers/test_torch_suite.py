"""Run torch's tests of DistributedDataParallel with Paceline's class on two ranks.

They catch wrong values, lost calls, errors that differ from DDP's, crashes and hangs. The failing
tests must be exactly those of expected.py.
"""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RUNNER = Path(__file__).with_name("runner.py")
# The number of tests that pass with torch's class on two CPU ranks; fewer means lost coverage.
NUM_REFERENCE = 77
DEADLINE_S = 1200.0  # takes half a minute on an idle machine


@pytest.mark.parametrize("exchange", ["auto", "allreduce", "tree", "host"])
def test_torchs_tests_pass_or_end_as_expected(exchange, start, tmp_path):
    outcomes = tmp_path / "outcomes.json"
    done = start(str(RUNNER), "--exchange", exchange, "--json", str(outcomes)).finish(DEADLINE_S)
    assert done.code == 0, done.out + done.err
    found = json.loads(outcomes.read_text())[exchange]
    assert len(found) >= NUM_REFERENCE
