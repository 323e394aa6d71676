"""A strategy from outside the package: one all-reduce of all gradients, when backward is over.

    worker0 compute   load fwd bwd          step
    exchange                      [ all ]

It is what somebody writes to add a strategy: a configuration, a plan, a replica and a record.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.collective import Collective
from paceline.core.cost import compute_lane
from paceline.core.link_fit import ExchangeSamples, line_through, linked_in_ring
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Plan, Task
from paceline.core.step import ComputeStep
from paceline.core.strategy import Strategy, Window
from paceline.core.transfer import Ring
from paceline.core.workload import Workload
from paceline.exchange.replica import SingleReplica, Statistics
from paceline.exchange.replicas import start
from paceline.links.group import Group
from paceline.record.recorder import Recorder

__all__ = ["STRATEGY", "replica", "start"]


@dataclass(frozen=True)
class Toy:
    workers: int = 2
    rounds: int = 1  # how often the gradients are exchanged, to have something to choose


def plan(workload: Workload, machine: Machine, config: Toy, window: Window) -> Plan:
    devices = machine.first_devices(config.workers)
    compute = ComputeStep(workload, devices)
    exchanges = []
    if config.workers > 1:
        ring = Ring.over(machine, devices, [compute_lane(device.name) for device in devices])
        size, count = workload.gradient_nbytes, workload.num_parameters
        exchanges = [
            Collective.over(ring, Kind.REDUCE, f"all{i}", size, count, None)
            for i in range(config.rounds)
        ]

    def tasks(step: int) -> Iterator[Task]:
        for worker in compute.workers:
            yield from compute.tasks(step, worker)
        last = tuple(compute.after_backward(step, worker) for worker in compute.workers)
        for exchange in exchanges:
            yield from exchange.tasks(step, last, ())
            last = (exchange.sent(step),)
        for worker in compute.workers:
            yield compute.step_task(step, worker, (*last, compute.after_backward(step, worker)))

    return Plan.of_steps(tasks, window.num_steps)


def calibrate(machine: Machine, measured: ExchangeSamples, config: Toy | None = None) -> Machine:
    return linked_in_ring(machine, machine.devices, line_through(measured))


class ToyReplica:
    """Averages all gradients in one message, when the last of them is there."""

    def __init__(self, module: nn.Module, config: Toy, group: Group) -> None:
        self._module, self._config, self._group = module, config, group
        self._parameters = list(module.parameters())
        self._ready = self._num_steps = 0
        self._recorder: Recorder | None = None
        group.broadcast(self._parameters)
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._count) for one in self._parameters
        ]

    def __call__(self, *args: Any) -> Any:
        return self._module(*args)

    def _count(self, parameter: torch.Tensor) -> None:
        self._ready += 1
        if self._ready == len(self._parameters):
            # Not here: the recorder has not heard of this gradient yet.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._ready = 0
        self._num_steps += 1
        for i in range(self._config.rounds):
            self._exchange(f"all{i}")

    def _exchange(self, part: str) -> None:
        joined = self._recorder.join_exchange(part) if self._recorder else None
        flat = torch.cat([one.grad.reshape(-1) for one in self._parameters])
        dist.all_reduce(flat)
        flat /= self._group.world_size
        parts = flat.split([one.numel() for one in self._parameters])
        for one, mean in zip(self._parameters, parts, strict=True):
            one.grad.copy_(mean.view_as(one))
        if self._recorder:
            self._recorder.leave_exchange(joined)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, run: Callable[[], None]) -> None: ...

    def exchange_state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_exchange_state(self, state: dict[str, torch.Tensor]) -> None: ...

    def record(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    def statistics(self) -> Statistics:
        return Statistics("toy", self._num_steps, 0, 0, None, None)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def replica(module: nn.Module, config: Toy, group: Group) -> ToyReplica | SingleReplica:
    return ToyReplica(module, config, group) if group.world_size > 1 else SingleReplica(module)


STRATEGY = Strategy(
    name="toy",
    config=Toy,
    plan=plan,
    run="toy_strategy",
    calibrate=calibrate,
    settings=frozenset({"port", "stretch"}),
)
