"""Which exchange, and which chunk: predicted from a short profile, for `exchange="auto"`."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.core.errors import InvalidInput
from paceline.core.workload import Cost, Workload
from paceline.exchange.replica import Replica
from paceline.links.group import Group
from paceline.models import describe
from paceline.planner import Forecast, forecast, rank
from paceline.record.clock import clock_for
from paceline.strategies import STRATEGIES, probers
from paceline.strategies.host.config import Host
from paceline.training.profile import measure_exchanges
from paceline.training.this_machine import Speed, this_machine
from paceline.tune.chunk import ChunkTuner, PredictedSearch, Trial, candidates

_EXCHANGES = ("allreduce", "tree", "host")
_NUM_PASSES = 3


@dataclass(frozen=True)
class Choice:
    """A replica, and why it is this one. `records` says whether recording it costs nothing."""

    replica: Replica
    why: str
    records: bool
    tuner: ChunkTuner | None = None

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The chunk sizes tried so far."""
        return self.tuner.trials if self.tuner else ()


def choose(
    module: nn.Module,
    inputs: tuple[Any, ...],
    group: Group,
    exchange: str,
    chunk: int | str,
) -> Choice:
    """Return the replica that was asked for; what is "auto" is predicted first.

    All ranks must call it together, each with the inputs of its next forward pass; rank 0's
    predictions decide.
    """
    if exchange in ("allreduce", "tree") or (exchange == "host" and isinstance(chunk, int)):
        return _asked_for(module, group, exchange, chunk)
    workload = describe(module, _tensors(inputs), type(module).__name__)
    forecasts = _forecasts(module, inputs, workload, group, exchange, chunk)
    best = rank(list(forecasts.values()))[0]
    own = [
        best.strategy,
        {str(c): f.step_s for c, f in _by_chunk(forecasts).items()},
        _why(forecasts),
    ]
    name, predicted, why = group.gather(own)[0]
    if name != "host":
        return _asked_for(module, group, name, chunk, why)
    if chunk != "auto":
        return _asked_for(module, group, "host", chunk, why)
    tuner = PredictedSearch({int(c): seconds for c, seconds in predicted.items()})
    run = import_module(STRATEGIES["host"].run)
    replica = run.replica(module, Host(workers=group.world_size), group, tuner)
    return Choice(replica, why, True, tuner)


def _asked_for(
    module: nn.Module, group: Group, exchange: str, chunk: int | str, why: str = ""
) -> Choice:
    strategy = STRATEGIES[exchange]
    options = {"chunk": chunk} if exchange == "host" else {}
    config = strategy.config(workers=group.world_size, **options)
    replica = import_module(strategy.run).replica(module, config, group)
    return Choice(replica, why or f"{exchange}: asked for", exchange != "allreduce")


def _tensors(inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        raise InvalidInput(
            "exchange: 'auto' must know what the module computes, and so must be given its inputs "
            "as positional tensors; otherwise name exchange and chunk"
        )
    return inputs


def _forecasts(
    module: nn.Module,
    inputs: tuple[Any, ...],
    workload: Workload,
    group: Group,
    exchange: str,
    chunk: int | str,
) -> dict[tuple[str, int], Forecast]:
    """Return what each exchange would take, host's with each chunk in question."""
    work = sum((layer.forward + layer.backward for layer in workload.layers), Cost())
    seconds = group.gather(_seconds(module, inputs, group))
    speeds = [Speed(work.flops / s, work.nbytes / s) for s in seconds]
    bare = this_machine(group, speeds)
    names = _EXCHANGES if exchange == "auto" else (exchange,)
    configs = {name: STRATEGIES[name].config(workers=group.world_size) for name in names}
    measured = measure_exchanges(workload, group, probers(configs, group))
    forecasts = {}
    for name in names:
        strategy = STRATEGIES[name]
        machine = strategy.calibrate(bare, measured[name])
        for size in _sizes(name, chunk, workload):
            options = {"chunk": size} if name == "host" else {}
            config = strategy.config(workers=group.world_size, **options)
            samples = workload.batch_size * group.world_size
            forecasts[name, size] = forecast(workload, machine, strategy, config, samples)
    return forecasts


def _sizes(name: str, chunk: int | str, workload: Workload) -> list[int]:
    if name != "host":
        return [0]
    return [chunk] if isinstance(chunk, int) else list(candidates(len(workload.layers)))


def _by_chunk(forecasts: Mapping[tuple[str, int], Forecast]) -> dict[int, Forecast]:
    return {size: forecast for (name, size), forecast in forecasts.items() if name == "host"}


def _why(forecasts: Mapping[tuple[str, int], Forecast]) -> str:
    """Say which is best, and what the others would take."""
    best: dict[str, Forecast] = {}
    for one in rank(list(forecasts.values())):
        best.setdefault(one.strategy, one)
    first, *others = best.values()
    rest = ", ".join(f"{one.strategy} {one.step_s * 1e3:.3g} ms" for one in others)
    return f"{first.strategy}: predicted {first.step_s * 1e3:.3g} ms a step ({first.why})" + (
        f"; {rest}" if rest else ""
    )


def _seconds(module: nn.Module, inputs: tuple[Any, ...], group: Group) -> float:
    """Return the seconds of forward and backward, on a copy, beside the other ranks."""
    copied = copy.deepcopy(module)
    clock = clock_for(group.device)
    times = []
    devices = [group.device] if group.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for _ in range(_NUM_PASSES):
            group.barrier()
            start = clock.mark()
            outputs = [t for t in tree_leaves(copied(*inputs)) if isinstance(t, Tensor)]
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            begin, end = clock.seconds([start, clock.mark()])
            times.append(end - begin)
            copied.zero_grad()
    return min(times)
