"""Measure the speed of the list scheduler on a chain-and-fan plan of a million tasks.

In each step of the plan, 16 devices each run a chain of 8 layers, and then an exchange joins them.
Each repeat builds a new plan.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from figures import Part, shown, spread, table
from paceline.core.cost import Rate, Roofline
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.simulate import simulate

NUM_TASKS, QUICK_TASKS = 1_000_000, 10_000
NUM_DEVICES, CHAIN = 16, 8
REPEATS, QUICK_REPEATS = 7, 2
_ROWS = {
    "build": "making the tasks and the plan",
    "prepare": "what a plan prepares on first use",
    "simulate": "`simulate`: price, schedule, timeline",
    "prepare_and_simulate": "both of the above: the first `simulate` of a plan",
}


def chain_and_fan(num_tasks: int) -> Iterator[Task]:
    """Yield the tasks of whole steps, at most `num_tasks` in total."""
    lanes = [Resource(f"gpu{device}", Lane.COMPUTE) for device in range(NUM_DEVICES)]
    work, message = Cost(1e9, 1e6, 1), Cost(nbytes=1e6, num_calls=1)
    network = (Resource("network", Lane.WIRE),)
    joined: tuple[TaskId, ...] = ()
    for step in range(num_tasks // (NUM_DEVICES * CHAIN + 1)):
        ends = []
        for device, lane in enumerate(lanes):
            after = joined
            for layer in range(CHAIN):
                done = TaskId(step, Kind.FORWARD, str(layer), device)
                yield Task(done, (lane,), work, after)
                after = (done,)
            ends += after
        reduced = TaskId(step, Kind.REDUCE)
        yield Task(reduced, network, message, tuple(ends))
        joined = (reduced,)


def measure(quick: bool) -> dict[str, Any]:
    """Return the medians and quartiles of the rates in tasks/s."""
    num_tasks, repeats = (QUICK_TASKS, QUICK_REPEATS) if quick else (NUM_TASKS, REPEATS)
    rows = [_once(num_tasks) for _ in range(repeats)]
    return {name: spread([row[name] for row in rows]) for name in rows[0]}


def _once(num_tasks: int) -> dict[str, float]:
    started = time.perf_counter()
    plan = Plan(chain_and_fan(num_tasks))
    built = time.perf_counter()
    plan.priced_alike, plan.held  # noqa: B018 - cached on first use
    prepared = time.perf_counter()
    simulate(plan, Roofline({resource: Rate(1e13, 1e11, 1e-5) for resource in plan.resources}))
    simulated = time.perf_counter()
    n = len(plan)
    return {
        "num_tasks": n,
        "build": n / (built - started),
        "prepare": n / (prepared - built),
        "simulate": n / (simulated - prepared),
        "prepare_and_simulate": n / (simulated - built),
    }


def text(figures: Mapping[str, Any]) -> str:
    """Return the table."""
    lines = [(name, shown(figures[key], 1e-6, 2)) for key, name in _ROWS.items()]
    title = f"A plan of {figures['num_tasks']['median']:,.0f} tasks on one core"
    return table(title, ("", "million tasks/s, median [quartiles]"), lines)


PARTS = {"scheduler": Part(measure, text)}
