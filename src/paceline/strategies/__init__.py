"""The ways of training in parallel, each in a folder of its own."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.strategy import Strategy
from paceline.strategies.allreduce import plan as allreduce
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.host import plan as host
from paceline.strategies.host.config import Host
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            name=name,
            config=config,
            plan=module.plan,
            calibrate=module.calibrate,
            run=f"paceline.strategies.{name}.run",
        )
        for name, config, module in (
            ("allreduce", AllReduce, allreduce),
            ("host", Host, host),
            ("tree", Tree, tree),
        )
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


def probers(configs: Mapping[str, Any], group: Any) -> dict[str, Callable[[int], Any]]:
    """Return for each strategy of `configs` what makes a probe of its exchange (`exchange.probe`).

    This imports the runners, and so torch.
    """
    return {
        name: _prober(import_module(find_strategy(name).run).exchange, config, group)
        for name, config in configs.items()
    }


def _prober(exchange: Callable[..., Any], config: Any, group: Any) -> Callable[[int], Any]:
    return lambda nbytes: exchange(nbytes, config, group)
