"""Workers that have the keys and lie: the run of the others ends with a result."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "faults"))

import lies

pytestmark = pytest.mark.slow

EPOCHS = {"wheel": 12, "local": 40}


@pytest.mark.parametrize("strategy", lies.STRATEGIES)
def test_honest_workers_end_with_a_result_whatever_three_others_say(strategy: str) -> None:
    found = lies.run(strategy, seed=7, lies=True, epochs=EPOCHS[strategy])
    assert not found.faults
    assert found.lies
