"""The ways of training in parallel, each in a folder of its own."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.strategy import Exchange, Prober, Strategy
from paceline.strategies.allreduce import plan as allreduce
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.hierarchy import plan as hierarchy
from paceline.strategies.hierarchy.config import Hierarchy
from paceline.strategies.hogbatch import plan as hogbatch
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.host import plan as host
from paceline.strategies.host.config import Host
from paceline.strategies.subbatch import plan as subbatch
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree
from paceline.strategies.wheel import plan as wheel
from paceline.strategies.wheel.config import Wheel

EXCHANGES = {
    strategy.name: strategy
    for strategy in (
        Exchange(
            name=name,
            config=config,
            plan=module.plan,
            memory=memory,
            symmetric=symmetric,
            calibrate=module.calibrate,
            run=f"paceline.strategies.{name}.run",
        )
        for name, config, module, memory, symmetric in (
            ("allreduce", AllReduce, allreduce, None, True),
            ("host", Host, host, host.memory, True),
            ("tree", Tree, tree, tree.memory, False),
        )
    )
}


def _policies(workers: int) -> list[Hogbatch]:
    """Return the policies that suit devices of different speed."""
    return [Hogbatch(workers=workers, policy=policy) for policy in ("adaptive", "cpu_gpu")]


_PLANNED = (
    Strategy(name="wheel", config=Wheel, plan=wheel.plan, memory=wheel.memory),
    Strategy(
        name="subbatch",
        config=SubBatch,
        plan=subbatch.plan,
        memory=subbatch.memory,
        symmetric=True,
    ),
    Strategy(
        name="hogbatch",
        config=Hogbatch,
        plan=hogbatch.plan,
        memory=hogbatch.memory,
        variants=_policies,
    ),
    Strategy(
        name="hierarchy",
        config=Hierarchy,
        plan=hierarchy.plan,
        memory=hierarchy.memory,
        variants=hierarchy.variants,
        symmetric=True,
    ),
)
STRATEGIES: dict[str, Strategy] = {**EXCHANGES, **{one.name: one for one in _PLANNED}}


# Those that can be trained by ranks which go step by step together.
IN_STEP: dict[str, Strategy] = {**EXCHANGES, "subbatch": STRATEGIES["subbatch"]}


def find_in_step(name: str) -> Strategy:
    """Return the strategy of that name whose ranks step together; InvalidInput lists the known."""
    if name in IN_STEP:
        return IN_STEP[name]
    problem = "can be planned, but not run here" if name in STRATEGIES else "is not known"
    raise InvalidInput(f"strategy: {name!r} {problem}; choose one of {', '.join(IN_STEP)}")


def find_exchange(name: str) -> Exchange:
    """Return the strategy of that name that can be run; InvalidInput lists the known ones."""
    if name in EXCHANGES:
        return EXCHANGES[name]
    problem = "can be planned, but not run here" if name in STRATEGIES else "is not known"
    raise InvalidInput(f"strategy: {name!r} {problem}; choose one of {', '.join(EXCHANGES)}")


def probers(configs: Mapping[str, Any], group: Any) -> dict[str, Prober]:
    """Return for each strategy of `configs` what makes probes of its exchange.

    This imports the runners, and so torch.
    """
    return {name: _prober(find_exchange(name), config, group) for name, config in configs.items()}


def _prober(strategy: Exchange, config: Any, group: Any) -> Prober:
    exchange = import_module(strategy.run).exchange
    return Prober(strategy, config, lambda sizes: exchange(sizes, config, group))
