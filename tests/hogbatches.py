"""Workloads and machines for tests of hogbatch."""

from boxes import FLOPS_PER_S, link
from paceline.core.plan import Cost
from paceline.core.timeline import Timeline
from paceline.core.workload import Layer, Parameter, Workload
from papers.hogbatch import plan_until, simulate_until, updates

POLICIES = ("hogwild", "hogbatch", "cpu_gpu", "proportional", "adaptive")
WAYS = [link("gpu1", "h", 1e6, 1e-3), link("gpu2", "h", 1.3e6, 1e-3)]
SHARED = [link("gpu1", "gpu2", 1e6), link("gpu2", "h", 1e6)]


def num_samples(timeline: Timeline) -> dict[str, int]:
    """Return the number of samples that each device trained on."""
    return {name: sum(one.num_samples for one in own) for name, own in updates(timeline).items()}


def per_sample(batch_size: int, numel: int = 1, seconds: float = 1.0) -> Workload:
    """Return two layers whose backward takes `seconds` per sample at 1 Gflop/s."""
    backward = Cost(batch_size * seconds / 2 * FLOPS_PER_S)
    layers = tuple(
        Layer(name, (Parameter("w", (numel,)),), 8 * batch_size, Cost(), backward)
        for name in ("a", "b")
    )
    return Workload("two", batch_size, layers, (1, 0), 40 * batch_size)


def run(work, machine, config, horizon_s):
    return simulate_until(plan_until(work, machine, config, horizon_s), machine, horizon_s)
