"""Look up training strategies by name; each strategy has a folder in this package.

The name `package.module:record` refers to the `Strategy` object `record` in another package.
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

# Strategies that average the gradients of all workers in each step. So they reach a loss in as
# many steps as one worker with the same batches. Their exchange can be measured without training.
EXCHANGES = {
    name: one
    for name, one in STRATEGIES.items()
    if one.planning.calibrate and not one.planning.steps_to_loss
}

# Strategies without a hub or coordinator process: all ranks take each training step together.
IN_STEP = {name: one for name, one in STRATEGIES.items() if one.running and not one.is_led}


def find_strategy(
    name: str, among: Mapping[str, Strategy] | None = None, why: str = "", also: str = ""
) -> Strategy:
    """Look up a strategy by its name, or by `package.module:record`.

    `among`: the allowed strategies by name; None: all. Strategies of other packages are always
    allowed. For other names raises InvalidInput: with the text `why` if such a strategy exists,
    otherwise with `also`, a text about other allowed values.
    """
    known = STRATEGIES if among is None else among
    if name in known:
        return known[name]
    if ":" in name:
        return _imported(name)
    if name in STRATEGIES:
        raise InvalidInput("strategy", why, got=name, hint=f"choose one of {', '.join(known)}")
    raise not_known("strategy", name, known, also)


def find_runnable(name: str, also: str = "") -> Strategy:
    """Look up a strategy that can train; raise InvalidInput if `name` can only be planned.

    `also`: text about other allowed values, for the error.
    """
    runnable = {name: one for name, one in STRATEGIES.items() if one.running}
    why = "cannot be run, only planned"
    strategy = find_strategy(name, runnable, why, also)
    if strategy.running is None:  # possible only for a strategy of another package
        raise InvalidInput("strategy", why, got=name)
    return strategy


def find_exchange(name: str) -> Strategy:
    """Look up a strategy that averages all gradients; raise InvalidInput for other strategies."""
    return find_strategy(name, EXCHANGES, "has no gradient exchange to measure without training")


def _imported(name: str) -> Strategy:
    found = imported("strategy", name)
    if not isinstance(found, Strategy):
        raise InvalidInput("strategy", f"is a {type(found).__name__}, not a Strategy", got=name)
    return found
