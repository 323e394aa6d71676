"""Bytes between the workers, by what they are for: as a rank counts them, and as planned."""

from dataclasses import dataclass, field

from paceline.codecs.between import Sent
from paceline.core.calibration import Line, linked_in_ring
from paceline.core.machine import Machine
from paceline.core.plan import COMMUNICATION, Kind, Task
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import plan

_ANY_LINE = Line(0.0, 1e-9)  # bytes are the same on any
PURPOSES = ("activations", "errors", "loss", "gradients")


@dataclass
class Traffic:
    """What a rank has handed to the others so far, in `num_steps` steps.

    Of activations, errors and loss a message has a header of 40 bytes, which counts; what the ranks
    tell each other of their labels counts as loss.
    """

    head: Sent = field(default_factory=Sent)
    loss: Sent = field(default_factory=Sent)
    num_steps: int = 0

    def per_step(self, gradient_nbytes: int) -> dict[str, float]:
        """Return the bytes sent in a step, given those of gradients so far."""
        steps = max(1, self.num_steps)
        told = self.loss.activations_sent
        counts = (self.head.activations_sent, self.head.errors_sent, told, gradient_nbytes)
        return {name: count / steps for name, count in zip(PURPOSES, counts, strict=True)}


def planned(workload: Workload, machine: Machine, config: SubBatch) -> dict[str, float]:
    """Return the bytes that each worker sends in a step by the plan: its link is its own."""
    nbytes = dict.fromkeys(PURPOSES, 0.0)
    for task in plan(workload, _apart(machine), config, Window(1)).tasks:
        if task.kind in COMMUNICATION and task.kind not in (Kind.ENCODE, Kind.DECODE):
            nbytes[_purpose(task)] += task.cost.nbytes
    return nbytes


def _purpose(task: Task) -> str:
    if task.kind is Kind.SEND:
        return "loss" if task.part.startswith("loss/") else "activations"
    return "errors" if ":errors/" in task.part else "gradients"


def _apart(machine: Machine) -> Machine:
    """Return the machine with a host for each device, which are joined in a ring."""
    if len(machine.devices) == 1:
        return machine
    names = [f"host{i}" for i in range(len(machine.devices))]
    hosts = tuple(machine.hosts[0].model_copy(update={"name": name}) for name in names)
    devices = tuple(
        device.model_copy(update={"host": name})
        for device, name in zip(machine.devices, names, strict=True)
    )
    spread = machine.model_copy(update={"hosts": hosts, "devices": devices})
    return linked_in_ring(spread, devices, _ANY_LINE)
