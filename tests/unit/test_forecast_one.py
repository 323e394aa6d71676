"""`paceline.forecast`: one configuration, as it stands in the ranking of `paceline.plan`."""

import pytest

import paceline
from paceline.core.errors import InvalidInput

MACHINE = "two-hosts-gigabit"


@pytest.mark.parametrize("strategy", ["allreduce", "host", "tree", "local", "wheel"])
def test_it_is_what_the_plan_says_of_that_strategy(strategy: str):
    found = paceline.forecast("lenet5", MACHINE, strategy, batch_size=32, workers=2)
    ranking = paceline.plan("lenet5", MACHINE, 32, workers=2, strategy=strategy)
    (same,) = [one for one in ranking if one.codec is None and one.strategy == strategy]
    assert found.step_s == pytest.approx(same.step_s)
    assert found.config == same.config
    assert found.efficiency == pytest.approx(same.efficiency)


def test_options_are_those_of_the_configuration():
    plain = paceline.forecast("alexnet", MACHINE, "allreduce", batch_size=32)
    coded = paceline.forecast(
        "alexnet", MACHINE, "allreduce", batch_size=32, options={"codec": "dynamic8"}
    )
    assert (plain.codec, coded.codec) == (None, "dynamic8")
    assert sum(coded.link_nbytes.values()) < 0.26 * sum(plain.link_nbytes.values())


def test_a_chunk_that_is_named_is_taken():
    found = paceline.forecast("lenet5", MACHINE, "host", options={"chunk": 3}, batch_size=32)
    assert found.config.chunk == 3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"strategy": "nonsense"}, "nonsense"),
        ({"strategy": "wheel", "balanced": True}, "balanced: strategy wheel"),
        ({"options": {"nofield": 1}}, "nofield"),
        ({"options": {"workers": 2}}, "workers is a setting of its own"),
        ({"workers": 3}, "workers"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_what_cannot_be_planned_is_refused(asked: dict, message: str):
    with pytest.raises(InvalidInput, match=message):
        paceline.forecast("lenet5", MACHINE, **asked)


def test_one_strategy_or_several():
    with pytest.raises(InvalidInput, match="strategy, strategies: give one"):
        paceline.plan("lenet5", MACHINE, strategy="host", strategies=["tree"])
