"""Look up training strategies by name; each strategy has a folder in this package.

The name `package.module:record` stands for a `Strategy` object of another package.
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

# Strategies that exchange all gradients in each step, and so reach a loss after the same number of
# steps as one worker. The exchange can be measured separately from computation.
EXCHANGES = {
    name: one
    for name, one in STRATEGIES.items()
    if one.planning.calibrate and not one.planning.steps_to_loss
}

# Strategies that train without a hub or coordinator: all ranks are equal and take steps together.
IN_STEP = {name: one for name, one in STRATEGIES.items() if one.running and not one.is_led}


def find_strategy(
    name: str, among: Mapping[str, Strategy] | None = None, why: str = ""
) -> Strategy:
    """Look up a strategy by its name, or by `package.module:record`.

    `among`: the allowed strategies by name; None allows all strategies. Raises InvalidInput for an
    unknown name. `why`: the text of InvalidInput for a known strategy that is not allowed.
    """
    known = STRATEGIES if among is None else among
    if name in known:
        return known[name]
    if ":" in name:
        return _imported(name)
    if name in STRATEGIES:
        raise InvalidInput("strategy", why, got=name, hint=f"choose one of {', '.join(known)}")
    raise not_known("strategy", name, known)


def find_runnable(name: str) -> Strategy:
    """Return a strategy that can train, or raise InvalidInput if it can only be planned."""
    runnable = {name: one for name, one in STRATEGIES.items() if one.running}
    return find_strategy(name, runnable, "cannot be run, only planned")


def find_exchange(name: str) -> Strategy:
    """Return a strategy whose exchange can be measured alone, or raise InvalidInput."""
    return find_strategy(name, EXCHANGES, "has no exchange that can be measured alone")


def _imported(name: str) -> Strategy:
    found = imported("strategy", name)
    if not isinstance(found, Strategy):
        raise InvalidInput("strategy", f"is a {type(found).__name__}, not a Strategy", got=name)
    return found
