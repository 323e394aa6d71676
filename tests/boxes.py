"""Machines and workloads for tests of plans; costs are zero unless a test sets them."""

from collections.abc import Sequence

from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.plan import COMPUTE, Cost, Kind, Plan, Task
from paceline.core.simulate import simulate
from paceline.core.workload import Layer, Parameter, Workload

FLOPS_PER_S = 1e9
FACT = {"memory_bytes": 1e9, "memory_bandwidth_bytes_per_s": 1e18, "source": "made up"}


def link(one: str, other: str, nbytes_per_s: float, latency_s: float = 0.0, **more) -> dict:
    """Return a link as in a machine file."""
    fact = {"bandwidth_bytes_per_s": nbytes_per_s, "latency_s": latency_s, "source": "made up"}
    return fact | {"between": [one, other]} | more


def ring(names: Sequence[str], nbytes_per_s: float, latency_s: float = 0.0, **more) -> list[dict]:
    """Return links from each place to the next one, and from the last to the first."""
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    pairs = pairs if len(names) > 2 else pairs[: len(names) - 1]
    return [link(*pair, nbytes_per_s, latency_s, **more) for pair in pairs]


def codec_speed(encode: float, decode: float, latency_s: float = 0.0) -> dict:
    """Return the speed of a codec's kernel, in values per second."""
    names = "encode_values_per_s", "decode_values_per_s", "latency_s"
    return dict(zip(names, (encode, decode, latency_s), strict=True))


# No losses, so that expected times are sums of task times.
NO_LOSSES = {"beside_exchange": 0.0, "spread": 0.0, "source": "a test"}


def box(
    *kinds: str, links: Sequence[dict] = (), hosts: Sequence[str] = "", host=None, device=None
) -> Machine:
    """Return a machine with a device of 1 Gflop/s for each kind; by default all on host h."""
    places = list(hosts or "h" * len(kinds))
    devices = [
        FACT
        | {"name": f"{kind}{i}", "host": place, "kind": kind, "flops_per_s": FLOPS_PER_S}
        | (device or {})
        for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    computers = [
        FACT | {"name": place, "cores": 8} | (host or {}) for place in dict.fromkeys(places)
    ]
    return Machine.model_validate(
        {
            "name": "box",
            "hosts": computers,
            "devices": devices,
            "links": list(links),
            "losses": NO_LOSSES,
        }
    )


def at_speeds(*speeds: float, kinds: Sequence[str] = (), **facts) -> Machine:
    """Return a box whose devices reach these Gflop/s; CPU workers by default."""
    machine = box(*(kinds or ["cpu"] * len(speeds)), **facts)
    devices = tuple(
        device.model_copy(update={"flops_per_s": speed * FLOPS_PER_S})
        for device, speed in zip(machine.devices, speeds, strict=True)
    )
    return machine.model_copy(update={"devices": devices})


def chain(*layers: tuple[float, int]) -> Workload:
    """Return a chain of layers with these (seconds of backward, bytes of gradients)."""
    made = tuple(
        Layer(f"l{i}", (Parameter("w", (nbytes // 4,)),), 0, Cost(), Cost(seconds * FLOPS_PER_S))
        for i, (seconds, nbytes) in enumerate(layers)
    )
    return Workload("chain", 1, made, tuple(reversed(range(len(layers)))), 0)


def named(plan: Plan) -> set[str]:
    """Return the names of all tasks of step 0, without their prefix."""
    return {task.name.removeprefix("s0/") for task in plan.tasks if task.name.startswith("s0/")}


def after(task: Task) -> tuple[str, ...]:
    """Return the names of the tasks that a task waits for."""
    return tuple(parent.name for parent in task.after)


class ExchangeOnly:
    """Costs of a machine's exchanges; computation is free."""

    free = COMPUTE

    def __init__(self, machine: Machine) -> None:
        self._roofline = Roofline.of(machine)

    def seconds(self, task: Task) -> float:
        """Return the seconds of a task."""
        return 0.0 if task.kind in self.free else self._roofline.seconds(task)


class WithoutUpdate(ExchangeOnly):
    """Costs of a machine; the weight update is free."""

    free = frozenset({Kind.STEP})


def exchange_s(plan: Plan, machine: Machine) -> float:
    """Return the seconds of a plan's exchange without computation."""
    return simulate(plan, ExchangeOnly(machine)).makespan_s
