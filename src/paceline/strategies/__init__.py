"""The ways of training in parallel: each a folder of its own, and one line in the table below.

A strategy from elsewhere is named as package.module:record, as a model is.
"""

from collections.abc import Mapping

from paceline.core.errors import InvalidInput
from paceline.core.importing import imported
from paceline.core.names import not_known
from paceline.core.strategy import Strategy
from paceline.strategies import allreduce, hierarchy, hogbatch, host, local, subbatch, tree, wheel

STRATEGIES: dict[str, Strategy] = {
    package.STRATEGY.name: package.STRATEGY
    for package in (allreduce, host, tree, wheel, subbatch, hogbatch, local, hierarchy)
}

# Those of equal workers that exchange all gradients in each step, and so learn the same: their
# exchange can be measured by itself, and they need as many steps to a loss.
EXCHANGES = {
    name: one
    for name, one in STRATEGIES.items()
    if one.planning.calibrate and not one.planning.steps_to_loss
}

# Those of ranks that go through a run step by step together.
IN_STEP = {name: one for name, one in STRATEGIES.items() if one.running and not one.is_led}


def find_strategy(
    name: str, among: Mapping[str, Strategy] | None = None, why: str = ""
) -> Strategy:
    """Return the strategy of that name, or of package.module:record; InvalidInput lists the known.

    `among` restricts the names to some of the table, and `why` says what the others are or lack.
    """
    known = STRATEGIES if among is None else among
    if name in known:
        return known[name]
    if ":" in name:
        return _imported(name)
    if name in STRATEGIES:
        raise InvalidInput("strategy", f"{name!r} {why}", hint=f"choose one of {', '.join(known)}")
    raise not_known("strategy", name, known)


def find_runnable(name: str) -> Strategy:
    """Return the strategy of that name that can be trained with; InvalidInput lists the known."""
    runnable = {name: one for name, one in STRATEGIES.items() if one.running}
    return find_strategy(name, runnable, "can be planned, but not run here")


def find_exchange(name: str) -> Strategy:
    """Return the strategy of that name whose exchange can be measured by itself."""
    why = "can be trained with and planned, but its exchange cannot be measured by itself"
    return find_strategy(name, EXCHANGES, why)


def _imported(name: str) -> Strategy:
    found = imported("strategy", name)
    if not isinstance(found, Strategy):
        raise InvalidInput("strategy", f"{name!r} is a {type(found).__name__}, not a Strategy")
    return found
