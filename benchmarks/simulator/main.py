"""How fast the list scheduler is, and what a task costs in memory.

A chain-and-fan plan of a million tasks: 16 devices go through a chain of layers each, then an
exchange joins them, and so on. Each repeat is a process of its own. Beside it the same schedule by
a plain loop over integer lists and a heap that knows neither names nor costs nor horizons.

    python benchmarks/simulator/main.py
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path

from paceline.core.cost import Rate, Roofline
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.simulate import schedule, simulate

NUM_TASKS = 1_000_000
NUM_DEVICES = 16
CHAIN = 8
REPEATS = 7


def chain_and_fan(num_tasks: int) -> Iterator[Task]:
    """Yield the tasks of as many whole steps as fit into `num_tasks`."""
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


def plain_loop(plan: Plan, seconds: Sequence[float]) -> float:
    """Schedule a plan whose tasks hold one resource each; return the makespan."""
    lane_of = [held[0] for held in plan.held]
    waiting, children = plan.num_parents.copy(), plan.children
    ready, free = [0.0] * len(plan), [0.0] * len(plan.resources)
    heap = [(0.0, i) for i, parents in enumerate(waiting) if not parents]
    while heap:
        start, i = heappop(heap)
        lane = lane_of[i]
        end = max(start, free[lane]) + seconds[i]
        free[lane] = end
        for child in children[i]:
            ready[child] = max(ready[child], end)
            waiting[child] -= 1
            if not waiting[child]:
                heappush(heap, (ready[child], child))
    return max(free)


def resident_nbytes() -> int:
    """Return the memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure() -> dict[str, float]:
    """Return the rates in tasks/s and the bytes per task of one process."""
    before = resident_nbytes()
    started = time.perf_counter()
    plan = Plan(chain_and_fan(NUM_TASKS))
    built = time.perf_counter()
    plan.priced_alike, plan.held  # noqa: B018 - made on first use
    prepared = time.perf_counter()
    with_plan = resident_nbytes()
    cost = Roofline({resource: Rate(1e13, 1e11, 1e-5) for resource in plan.resources})
    timeline = simulate(plan, cost)
    simulated = time.perf_counter()
    with_timeline = resident_nbytes()
    seconds = [cost.seconds(task) for task in plan.tasks]
    begun = time.perf_counter()
    schedule(plan, cost)
    scheduled = time.perf_counter()
    makespan = plain_loop(plan, seconds)
    looped = time.perf_counter()
    assert abs(makespan - timeline.makespan_s) < 1e-9 * makespan
    n = len(plan)
    return {
        "num_tasks": n,
        "build": n / (built - started),
        "prepare": n / (prepared - built),
        "simulate": n / (simulated - prepared),
        "prepare_and_simulate": n / (simulated - built),
        "schedule": n / (scheduled - begun),
        "plain_loop": n / (looped - scheduled),
        "plan_nbytes": (with_plan - before) / n,
        "timeline_nbytes": (with_timeline - with_plan) / n,
    }


def main() -> None:
    """Repeat the measurement in fresh processes and print the table."""
    from figures import shown, spread, write

    here = Path(__file__).parent
    rows = []
    for _ in range(REPEATS):
        command = [sys.executable, __file__, "--once"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
    figures = {key: spread([row[key] for row in rows]) for key in rows[0]}
    figures["schedule_per_plain_loop"] = spread([r["schedule"] / r["plain_loop"] for r in rows])
    write(here, figures)
    print(f"{int(figures['num_tasks']['median']):,} tasks, million tasks/s, median [quartiles]")
    for key in ("build", "prepare", "simulate", "prepare_and_simulate", "schedule", "plain_loop"):
        print(f"  {key:22} {shown(figures[key], 1e-6)}")
    print(f"  schedule / plain loop  {shown(figures['schedule_per_plain_loop'])}")
    for key in ("plan_nbytes", "timeline_nbytes"):
        print(f"  {key:22} {shown(figures[key], digits=0)} bytes a task")


if __name__ == "__main__":
    if sys.argv[1:] == ["--once"]:
        print(json.dumps(measure()))
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        main()
