"""The ways of training in parallel, each in a folder of its own."""

from paceline.core.errors import InvalidInput
from paceline.core.strategy import Strategy
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import plan as plan_allreduce

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("allreduce", AllReduce, plan_allreduce, "paceline.strategies.allreduce.run"),
    )
}


def find_strategy(name: str) -> Strategy:
    """Return the strategy of that name; InvalidInput lists the known ones."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise InvalidInput(
            f"strategy: {name!r} is not known; choose one of {', '.join(STRATEGIES)}"
        ) from None
