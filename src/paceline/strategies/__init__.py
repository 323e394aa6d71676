"""The ways of training in parallel: each a folder of its own, and one line in the table below.

A strategy from elsewhere is named as package.module:record, as a model is.
"""

from collections.abc import Mapping
from importlib import import_module

from paceline.core.errors import InvalidInput
from paceline.core.strategy import Strategy
from paceline.strategies import allreduce, hierarchy, hogbatch, host, local, subbatch, tree, wheel

STRATEGIES: dict[str, Strategy] = {
    package.STRATEGY.name: package.STRATEGY
    for package in (allreduce, host, tree, wheel, subbatch, hogbatch, local, hierarchy)
}

# Those of equal workers that exchange all gradients in each step.
EXCHANGES = {name: one for name, one in STRATEGIES.items() if one.calibrate is not None}

# Those of ranks that go through a run step by step together.
IN_STEP = {name: one for name, one in STRATEGIES.items() if one.run and not one.is_led}


def find_strategy(name: str, among: Mapping[str, Strategy] | None = None) -> Strategy:
    """Return the strategy of that name, or of package.module:record; InvalidInput lists the known.

    `among` restricts the names to some of the table.
    """
    known = STRATEGIES if among is None else among
    if name in known:
        return known[name]
    if ":" in name:
        return _imported(name)
    problem = "can be planned, but not run here" if name in STRATEGIES else "is not known"
    raise InvalidInput(f"strategy: {name!r} {problem}; choose one of {', '.join(known)}")


def find_runnable(name: str) -> Strategy:
    """Return the strategy of that name that can be trained with; InvalidInput lists the known."""
    return find_strategy(name, {name: one for name, one in STRATEGIES.items() if one.run})


def find_exchange(name: str) -> Strategy:
    """Return the strategy of that name whose exchange can be measured by itself."""
    return find_strategy(name, EXCHANGES)


def _imported(name: str) -> Strategy:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"strategy: {name!r} cannot be imported: {error}") from None
    if not isinstance(found, Strategy):
        raise InvalidInput(f"strategy: {name!r} is a {type(found).__name__}, not a Strategy")
    return found
