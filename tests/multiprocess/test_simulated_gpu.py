"""Whole commands, and ranks, on a simulated GPU: as on a real one, and labelled as what it is."""

import json

import pytest

from launched import output

NAME = "simulated on the host's memory"


@pytest.fixture
def one_gpu(monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "1")


def test_encoded_sums_on_a_device_are_those_of_the_host(tmp_path):
    """Both threads have a stream of their own; a race between them or the caller's is an error."""
    rows = json.loads(output(tmp_path, 2, "simulated_sums.py"))
    for row in rows:
        assert row["differing"] == []
        assert row["void"] == [True, True]
        assert row["agreed"] == [1.0, 2.0]
        assert row["deadline"] == 60.0
