"""When a rank trains without the others, with step times that the test sets."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.exchange.alone import Comparison
from paceline.runs import lone
from paceline.strategies import EXCHANGES


@pytest.mark.parametrize(
    ("together_s", "expected"),
    [
        ({"allreduce": 0.42, "host": 0.31}, []),  # the exchange predicted second is faster
        ({"allreduce": 0.42, "host": 0.40}, ["allreduce", "host"]),
        ({"allreduce": 0.90, "host": 0.31}, ["allreduce"]),  # no exchange can be so much faster
        ({}, []),
    ],
)
def test_a_rank_alone_must_be_faster_than_each_exchange(monkeypatch, together_s, expected):
    def compare(setup: Any, group: Any, replicate: Any, *_: Any) -> Comparison:
        own_s = together_s[replicate.keywords["config"]]
        return Comparison(0.37, own_s, own_s > 0.37)

    monkeypatch.setattr(lone, "compare_with_alone", compare)
    for strategy in EXCHANGES.values():
        runner = SimpleNamespace(replica=lambda *_, **__: None)
        monkeypatch.setattr(type(strategy), "runner", lambda self, runner=runner: runner)
    found = lone._comparisons(
        SimpleNamespace(setup=None),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        {name: name for name in together_s},
        [4, 4],
        0,
    )
    assert [one.together_s for one in found] == [together_s[name] for name in expected]
