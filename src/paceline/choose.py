"""Which exchange, and which chunk: predicted from a short profile, for `exchange="auto"`."""

import copy
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.wire_format import WIRE_FORMATS
from paceline.core.workload import Workload
from paceline.data.balanced import BalancedSampler
from paceline.exchange.balanced import Balanced
from paceline.exchange.compressed import Compression
from paceline.exchange.replica import Alone, Replica
from paceline.links.group import Group
from paceline.models import describe
from paceline.models.layers import layers_of
from paceline.planner import Forecast, chunk_seconds, forecast, rank
from paceline.planner.admission import admit, refused
from paceline.record.clock import clock_for
from paceline.strategies import EXCHANGES, probers
from paceline.strategies.host.config import Host
from paceline.training.exchanges import measure_exchanges
from paceline.training.this_machine import Speed, this_machine
from paceline.tune.chunk import ChunkTuner, PredictedSearch, RuntimeSearch, Trial

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
    compression: Compression | None = None,
) -> Choice:
    """Return the replica that was asked for; what is "auto" is predicted first.

    With a codec only exchanges that have one are looked at, as they are with it.

    All ranks must call it together, each with the inputs of its next forward pass; rank 0's
    predictions decide.
    """
    if exchange != "auto" and (exchange != "host" or chunk != "auto"):
        return _asked_for(module, group, exchange, chunk, compression, f"{exchange}: asked for")
    try:
        workload = describe(module, _tensors(inputs), type(module).__name__)
    except InvalidInput as error:
        if exchange == "auto":
            raise InvalidInput(f"exchange: 'auto' predicts, but {error}; name one") from error
        search = RuntimeSearch(len(layers_of(module)))
        why = f"host: asked for; its chunk is searched without a prediction, because {error}"
        return Choice(_host(module, group, compression, search), why, True, search)
    best, chunks, why = _predicted(module, inputs, workload, group, exchange, compression)
    if best != "host" or chunk != "auto":
        return _asked_for(module, group, best, chunk, compression, why)
    tuner = PredictedSearch({int(size): seconds for size, seconds in chunks.items()})
    return Choice(_host(module, group, compression, tuner), why, True, tuner)


def balanced(module: nn.Module, group: Group, force: bool) -> Balanced:
    """Return what balances batches, around no exchange yet.

    A rank that would not help gets no samples, unless it is to be there by `force`; rank 0 says why
    on standard error.
    """

    def refuse(speeds: Sequence[float], sampler: BalancedSampler) -> list[int]:
        verdicts = refused(admit(speeds, sampler.batch_size, most=sampler.most))
        end = "gets some all the same, by force" if force else "gets no samples (force overrides)"
        for verdict in verdicts if group.rank == 0 else ():
            sys.stderr.write(f"paceline: {verdict.why}; it {end}\n")
        return [] if force else [verdict.worker for verdict in verdicts]

    return Balanced(Alone(module), module, group, admit=refuse)


def _host(
    module: nn.Module, group: Group, compression: Compression | None, tuner: ChunkTuner
) -> Replica:
    run = import_module(EXCHANGES["host"].run)
    config = Host(workers=group.world_size)
    replica: Replica = run.replica(module, config, group, compression=compression, tuner=tuner)
    return replica


def _asked_for(
    module: nn.Module,
    group: Group,
    exchange: str,
    chunk: int | str,
    compression: Compression | None,
    why: str,
) -> Choice:
    strategy = EXCHANGES[exchange]
    options = {"chunk": chunk} if exchange == "host" and chunk != "auto" else {}
    config = strategy.config(workers=group.world_size, **options)
    with_codec = {} if exchange == "tree" else {"compression": compression}
    replica = import_module(strategy.run).replica(module, config, group, **with_codec)
    return Choice(replica, why, exchange != "allreduce")


def _tensors(inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        raise InvalidInput("the module is not called with positional tensors alone")
    return inputs


def _predicted(
    module: nn.Module,
    inputs: tuple[Any, ...],
    workload: Workload,
    group: Group,
    exchange: str,
    compression: Compression | None,
) -> tuple[str, dict[str, float], str]:
    """Return the best exchange, the predicted seconds of host's chunks, and why: rank 0's."""
    seconds = group.gather(_seconds(module, inputs, group))
    bare = this_machine(group, [Speed.of(workload, one) for one in seconds])
    names: tuple[str, ...] = tuple(EXCHANGES) if exchange == "auto" else (exchange,)
    fields: dict[str, Any] = {"workers": group.world_size}
    if compression is not None:
        names = tuple(name for name in names if name != "tree")
        fields["codec"] = _planned_name(compression.codec)
    configs = {name: EXCHANGES[name].config(**fields) for name in names}
    measured = measure_exchanges(workload, group, probers(configs, group), bare)
    own = None
    if group.rank == 0:
        machines = {
            name: EXCHANGES[name].calibrate(bare, measured[name], configs[name]) for name in names
        }
        own = _ranked(workload, machines, configs)
    best, chunks, why = group.gather(own)[0]
    return best, chunks, why


def _planned_name(codec: str | Codec) -> str:
    """Return the name by which a plan knows a codec."""
    if isinstance(codec, str):
        return codec
    name = re.split(r"[/*]", codec.name)[0]
    if name not in WIRE_FORMATS:
        raise InvalidInput(
            f"codec: no plan knows how many bytes {codec.name!r} takes; name the exchange and the "
            "chunk, so that nothing has to be predicted"
        )
    return name


def _ranked(
    workload: Workload, machines: Mapping[str, Machine], configs: dict[str, Any]
) -> tuple[str, dict[str, float], str]:
    """Predict each exchange on the machine as it finds it."""
    workers, host = configs["host"].workers, EXCHANGES["host"]
    chunks = chunk_seconds(workload, machines["host"], host, configs["host"])
    chunk = min(chunks, key=chunks.__getitem__)
    configs["host"] = replace(configs["host"], chunk=chunk)
    samples = workload.batch_size * workers
    forecasts = rank(
        [
            forecast(workload, machine, EXCHANGES[name], configs[name], samples)
            for name, machine in machines.items()
        ]
    )
    by_text = {str(size): step_s for size, step_s in chunks.items()}
    return forecasts[0].strategy, by_text, _why(forecasts)


def _why(forecasts: Sequence[Forecast]) -> str:
    """Say which is best, and what the others would take."""
    first, *others = forecasts
    rest = "".join(f"; {one.strategy} {one.step_s * 1e3:.3g} ms" for one in others)
    return f"{first.strategy}: predicted {first.step_s * 1e3:.3g} ms a step, {first.why}{rest}"


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
