"""What a step takes on the machine of a file: each method's plan, priced and simulated."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.planner import chunk_seconds, forecast
from paceline.planner.search import shortage
from paceline.scaling.steps import Step
from paceline.scaling.subject import Subject
from paceline.strategies import find_exchange


@dataclass(frozen=True)
class Predicted:
    """Predictions for a model on a machine, whose first devices are the workers."""

    subject: Subject
    machine: Machine

    @property
    def capacity_bytes(self) -> float:
        """The memory of the smallest device."""
        return min(device.memory_bytes for device in self.machine.devices)

    def step(self, method: str, workers: int, batch_size: int) -> Step:
        """Return what a step takes; with strategy host, by the best of its chunks.

        InvalidInput if the machine has fewer devices, their links do not allow the method, or what
        they need to hold does not fit.
        """
        strategy = find_exchange(method)
        workload = self.subject.workload(-(-batch_size // workers))
        machine = self.machine.for_workers(workers, strategy.symmetric)
        config: Any = strategy.config(workers=workers)
        if hasattr(config, "chunk") and workers > 1:
            seconds = chunk_seconds(workload, machine, strategy, config)
            config = replace(config, chunk=min(seconds, key=seconds.__getitem__))
        found = forecast(workload, machine, strategy, config, batch_size)
        problem = shortage(machine, found.memory_nbytes)
        if problem:
            raise InvalidInput(problem)
        parts = {name.removesuffix("_s"): value for name, value in asdict(found.breakdown).items()}
        return Step(
            found.step_s,
            parts,
            max(found.memory_nbytes[name] for name in found.devices),
        )
