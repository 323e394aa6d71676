"""torch's own tests of DistributedDataParallel, with Paceline's class in its place, on two ranks.

They would catch wrong numbers, a call that is lost, errors where DDP has none or others, a crash, a
hang. What does not pass is in expected.py, with the reason: there may be neither more nor less.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import Started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RUNNER = Path(__file__).with_name("runner.py")
# So many pass with torch's own class on two CPU ranks: with fewer this would show less than it did.
NUM_REFERENCE = 77
DEADLINE_S = 1200.0  # half a minute where nothing else runs


@pytest.mark.parametrize("exchange", ["auto", "allreduce", "tree", "host"])
def test_torchs_tests_pass_or_end_as_expected(exchange, start, tmp_path):
    outcomes = tmp_path / "outcomes.json"
    done = start(str(RUNNER), "--exchange", exchange, "--json", str(outcomes)).finish(DEADLINE_S)
    assert done.code == 0, done.out + done.err
    found = json.loads(outcomes.read_text())[exchange]
    assert len(found) >= NUM_REFERENCE


def test_the_readme_has_the_table_that_runs_are_held_to(start: Callable[..., Started]) -> None:
    table = start(str(RUNNER), "--table").finish().out
    assert table in RUNNER.with_name("README.md").read_text()
