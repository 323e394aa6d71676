"""Compare training steps of one model with different exchanges, on the same ranks.

Each variant has its own copy of the model and its own optimizer, and runs real steps.
"""

import gc
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from paceline import DataParallel, ddp_hook
from paceline.core.cost import LayerTimes
from paceline.core.workload import Workload
from paceline.exchange.replica import Statistics
from paceline.links.arena import Arena
from paceline.links.devices import device_of
from paceline.links.group import Group
from paceline.training.models import find
from paceline.training.models.paced import PacedModel, PacedSGD
from ranks import DEADLINE_S, Blocks, Variant, alternate, compare, rounds_within, timed

_NUM_WARM_UP = 2  # DistributedDataParallel rebuilds its buckets after the first step
_INTERVAL = 11  # steps within which an unfinished chunk search measures another size
_BUCKETS_MB = (10, 25, 100)
_WIRE = Path("/sys/class/net/wire/statistics")  # exists on two simulated hosts
Wrap = Callable[[nn.Module], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer."""

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Tensor
    targets: Tensor

    @classmethod
    def synthetic(cls, name: str, batch_size: int, device: torch.device) -> "Task":
        """Build a built-in model on random data: AdamW for tokens, else SGD with momentum."""
        architecture = find(name)
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, *(architecture.input_shape or ()))
        num_classes, optimizer = architecture.num_classes or 1, _sgd
        if architecture.input_dtype == torch.int64:
            inputs = torch.randint(num_classes, shape, generator=generator)
            targets, optimizer = inputs.roll(-1, 1), _adamw
        else:
            # Draw many classes: a single class is learnt in five steps. Gradients are then
            # subnormal, and some processors compute with subnormal numbers twenty times slower.
            inputs = torch.randn(shape, generator=generator)
            targets = torch.randint(num_classes, (batch_size,), generator=generator)
        return cls(
            build=lambda: architecture.build(None).to(device),
            optimizer=optimizer,
            inputs=inputs.to(device),
            targets=targets.to(device),
        )

    @classmethod
    def paced(cls, workload: Workload, times: LayerTimes) -> "Task":
        """Build a model whose layers sleep for these times instead of computing."""
        return cls(
            build=lambda: PacedModel(workload, times.forward_s, times.backward_s),
            optimizer=lambda model: PacedSGD(model.parameters(), times.update_s),
            inputs=torch.zeros(1, 1),
            targets=torch.zeros(1, dtype=torch.int64),
        )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


@dataclass
class Trainee:
    """A wrapped copy of the task's model, its optimizer, and a plain PyTorch training step."""

    task: Task
    wrap: Wrap

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model = self.task.build()
        self.parallel = self.wrap(model)
        self.optimizer = self.task.optimizer(model)

    def step(self) -> None:
        """Run forward and backward, and update the weights."""
        scores = self.parallel(self.task.inputs).flatten(0, -2)  # rows: samples or tokens
        loss = cross_entropy(scores, self.task.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Together:
    """A model whose ranks wait for each other after backward, and exchange nothing."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model, self._device = model, device_of(group.device)
        arena = Arena(group, 8, 1, 0, DEADLINE_S)
        arena.set_chunks([[]])
        self._exchange = exchanging(arena)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Run the forward pass."""
        outputs: Tensor = self._model(inputs)
        outputs.register_hook(lambda _: Variable._execution_engine.queue_callback(self._meet))
        return outputs

    def _meet(self) -> None:
        self._device.synchronize()  # wait for backward, which may still run on a GPU
        self._exchange()


def exchanging(arena: Arena) -> Callable[[], None]:
    """Return a function that runs an exchange of the arena's only chunk."""
    steps = itertools.count(1)

    def once() -> None:
        arena.begin(next(steps))
        arena.post(0)
        arena.commit()
        arena.wait_step()

    return once


def alone(model: nn.Module) -> nn.Module:
    """Return the model unchanged: its ranks exchange nothing."""
    return model


def ours(exchange: str, **options: Any) -> Wrap:
    """Return a function that wraps a model in `paceline.DataParallel`."""
    options = {"gradient_as_bucket_view": True, "deadline_s": DEADLINE_S} | options
    return partial(DataParallel, exchange=exchange, **options)


def ddp(mb: int = 25, hook: str | Callable[..., Any] | None = None) -> Wrap:
    """Return a function that wraps a model in DistributedDataParallel with buckets of `mb` MB.

    `hook`: a codec's name for `paceline.ddp_hook`, or a torch hook that needs no state.
    """

    def wrap(model: nn.Module) -> DistributedDataParallel:
        parallel = DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=True)
        if hook is not None:
            state, function = ddp_hook(hook) if isinstance(hook, str) else (None, hook)
            parallel.register_comm_hook(state, function)
            parallel.hook_state = state
        return parallel

    return wrap


def buckets(sizes_mb: Sequence[int] = _BUCKETS_MB) -> dict[str, Wrap]:
    """Return a DistributedDataParallel wrapper for each bucket size."""
    return {f"DDP {mb} MB": ddp(mb) for mb in sizes_mb}


def wraps(group: Group, *names: str, buckets_mb: Sequence[int] = _BUCKETS_MB) -> dict[str, Wrap]:
    """Return the wrappers of the variants without exchange, of DDP, and of `names`.

    *lone*: rank 0 alone on an idle machine. *apart*: all ranks compute at once, which shows how
    much they slow each other down. *together*: ranks also wait for each other in every step, which
    is a lower bound for every exchange.
    """
    known: dict[str, Wrap] = {
        "host": ours("host", chunk=1),
        "host, chunk auto": ours("host", chunk="auto"),
        "tree": ours("tree"),
        "auto": ours("auto"),
    }
    idle: dict[str, Wrap] = {"lone": alone, "apart": alone}
    idle["together"] = partial(Together, group=group)
    return {**idle, **buckets(buckets_mb), **{name: known[name] for name in names}}


class Taken(NamedTuple):
    """Seconds of all variants' steps by block, the trainees, and median bytes per step.

    `before`: statistics of Paceline's variants before the first block. Bytes are counted in frames
    that this rank's host sent and received; they are 0 unless two hosts are simulated.
    """

    blocks: dict[str, list[list[float]]]
    trainees: dict[str, Trainee]
    before: dict[str, Statistics]
    sent_nbytes: dict[str, float]
    received_nbytes: dict[str, float]


class _Counted:
    """Runs steps, and records the bytes that this host sent and received per step."""

    def __init__(self, run: Callable[[int], list[float]]) -> None:
        self._run = run
        self.nbytes: dict[str, list[float]] = {"tx": [], "rx": []}

    def __call__(self, num_times: int) -> list[float]:
        before = wire_nbytes()
        seconds = self._run(num_times)
        for way, nbytes in wire_nbytes().items():
            self.nbytes[way].append((nbytes - before[way]) / num_times)
        return seconds


def wire_nbytes() -> dict[str, int]:
    """Return the bytes of frames that this host sent (tx) and received (rx) so far."""
    files = {way: _WIRE / f"{way}_bytes" for way in ("tx", "rx")}
    return {way: int(file.read_text()) if file.exists() else 0 for way, file in files.items()}


def taken(
    task: Task,
    wraps: Mapping[str, Wrap],
    group: Group,
    num_blocks: int,
    num_steps: int,
    *,
    budget_s: float | None = None,
    warm_up: Mapping[str, int] | None = None,
    others: Iterable[tuple[str, Callable[[], object]]] = (),
) -> Taken:
    """Run steps of all variants and of `others` in alternating blocks.

    `budget_s`: time for all blocks; if it is too short, fewer than `num_blocks` run, at least 2.
    `warm_up`: number of steps of a variant before the first block. Without it, "auto" variants run
    until they have decided.
    """
    trainees: dict[str, Trainee] = {}
    warm = dict(warm_up or {})
    steps: dict[str, Callable[[], object]] = {}
    for name, wrap in wraps.items():
        group.barrier()
        if name == "lone" and group.rank:
            steps[name] = _never
            continue
        trainees[name] = trainee = Trainee(task, wrap)
        steps[name] = trainee.step
        for _ in range(warm.get(name, _NUM_WARM_UP)):
            trainee.step()
        if name.endswith("auto") and name not in warm:
            _settle(trainee, group)
    for name, step in others:
        steps[name] = step
        for _ in range(_NUM_WARM_UP):
            step()
    synchronize = device_of(group.device).synchronize
    counted = {name: _Counted(timed(step, 0, synchronize)) for name, step in steps.items()}
    variants = [
        Variant(name, run, 1 if name == "lone" else group.world_size)
        for name, run in counted.items()
    ]
    if budget_s is not None:
        num_blocks = rounds_within(budget_s, variants, group, num_steps, num_blocks)
    before = _statistics(trainees)
    blocks = alternate(variants, group, num_blocks, num_steps)
    nbytes = {
        way: {name: median(run.nbytes[way] or [0.0]) for name, run in counted.items()}
        for way in ("tx", "rx")
    }
    return Taken(blocks, trainees, before, nbytes["tx"], nbytes["rx"])


def measure(
    task: Task,
    wraps: Mapping[str, Wrap],
    group: Group,
    num_blocks: int,
    num_steps: int,
    budget_s: float | None = None,
) -> dict[str, Any]:
    """Return each variant's figures on rank 0: seconds, ratio to `host`, and chosen exchange."""
    found = taken(task, wraps, group, num_blocks, num_steps, budget_s=budget_s)
    figures = _figures(found) if group.rank == 0 else {}
    for trainee in found.trainees.values():
        if isinstance(trainee.parallel, DataParallel):
            trainee.parallel.close()
    found.trainees.clear()
    gc.collect()  # modules are in reference cycles; free their memory for the next case
    return figures


def _statistics(trainees: Mapping[str, Trainee]) -> dict[str, Statistics]:
    return {
        name: trainee.parallel.statistics()
        for name, trainee in trainees.items()
        if isinstance(trainee.parallel, DataParallel)
    }


def _never() -> None:
    raise RuntimeError("only rank 0 runs the variant lone")


def _settle(trainee: Trainee, group: Group) -> None:
    """Run steps until the model tries no further exchanges and chunk sizes."""
    parallel = trainee.parallel
    before, now = -1, 0
    while now > before or "being measured" in parallel.why:
        for _ in range(_INTERVAL):
            trainee.step()
        before, now = now, group.gather(len(parallel.trials))[0]


def _exchange_of(before: Statistics, after: Statistics) -> dict[str, Any]:
    """Return the exchange, its exposed and hidden seconds per step, and its hidden share."""
    num_steps = after.num_steps - before.num_steps
    figures = {"exchange": after.exchange, "chunk": after.chunk, "num_steps": num_steps}
    if None in (before.exposed_s, before.hidden_s, after.exposed_s, after.hidden_s):
        return figures  # torch's reducer does not measure them
    exposed_s, hidden_s = (
        (getattr(after, name) - getattr(before, name)) / num_steps
        for name in ("exposed_s", "hidden_s")
    )
    share = hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None
    return figures | {"exposed_s": exposed_s, "hidden_s": hidden_s, "hidden_share": share}


def _figures(found: Taken) -> dict[str, Any]:
    blocks: Blocks = found.blocks
    rows = compare(blocks, "host")
    for name, row in compare(blocks, "lone").items():
        rows[name]["added_s"] = row["difference_s"]
        del rows[name]["difference_s"]
    for name, after in _statistics(found.trainees).items():
        rows[name]["exchange"] = _exchange_of(found.before[name], after)
    every_ddp = [name for name in rows if name.startswith("DDP")]
    figures: dict[str, Any] = {
        "variants": rows,
        "best_ddp": min(every_ddp, key=lambda name: rows[name]["seconds"]["median"]),
    }
    if "auto" in found.trainees:
        auto = found.trainees["auto"].parallel
        figures["why"] = auto.why
    return figures
