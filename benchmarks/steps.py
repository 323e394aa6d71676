"""Training steps of one model, exchanged in different ways, beside each other on the same ranks.

Each variant has its own copy of the model and its own optimizer, and takes real steps.
"""

import gc
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from paceline import DataParallel
from paceline.exchange.replica import Statistics
from paceline.links.arena import Arena
from paceline.links.devices import device_of
from paceline.links.group import Group
from ranks import DEADLINE_S, Variant, alternate, compare, rounds_within, timed
from trainee import Task, Trainee, Wrap

_NUM_WARM_UP = 2  # DistributedDataParallel forms its buckets anew after its first step
_INTERVAL = 11  # steps in which a chunk search has measured another size, if it is not done
_BUCKETS_MB = (10, 25, 100)


class Together:
    """A model whose backward pass ends when all ranks have ended theirs, and exchanges nothing."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model, self._device = model, device_of(group.device)
        self._arena = Arena(group, 8, 1, 0, DEADLINE_S)
        self._arena.set_chunks([[]])
        self._steps = itertools.count(1)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Run the forward pass."""
        outputs: Tensor = self._model(inputs)
        outputs.register_hook(lambda _: Variable._execution_engine.queue_callback(self._meet))
        return outputs

    def _meet(self) -> None:
        self._device.synchronize()  # the host is ahead of a GPU, whose backward is not over
        self._arena.begin(next(self._steps))
        self._arena.post(0)
        self._arena.commit()
        self._arena.wait_step()


def wraps(group: Group, *names: str, buckets_mb: Sequence[int] = _BUCKETS_MB) -> dict[str, Wrap]:
    """Return how each variant makes a model parallel: those that exchange nothing, DDP, and names.

    *lone* is rank 0 alone, on a machine that does nothing else; *apart* are all ranks at once: so
    far computing beside others slows a rank down; *together* are ranks that also wait for each
    other in every step: what no exchange can go below.
    """
    ours = partial(DataParallel, deadline_s=DEADLINE_S, gradient_as_bucket_view=True)
    known: dict[str, Wrap] = {
        "host": partial(ours, exchange="host", chunk=1),
        "host, chunk auto": partial(ours, exchange="host", chunk="auto"),
        "host, copied": partial(DataParallel, exchange="host", chunk=1, deadline_s=DEADLINE_S),
        "tree": partial(ours, exchange="tree"),
        "auto": partial(ours, exchange="auto"),
        "DDP, copied": DistributedDataParallel,
    }
    ddp: dict[str, Wrap] = {
        f"DDP {mb} MB": partial(
            DistributedDataParallel, bucket_cap_mb=mb, gradient_as_bucket_view=True
        )
        for mb in buckets_mb
    }
    alone: dict[str, Wrap] = {
        "lone": lambda model: model,
        "apart": lambda model: model,
        "together": partial(Together, group=group),
    }
    return {**alone, **ddp, **{name: known[name] for name in names}}


def measure(
    task: Task,
    wraps: Mapping[str, Wrap],
    group: Group,
    num_blocks: int,
    num_steps: int,
    budget_s: float | None = None,
) -> dict[str, Any]:
    """Return the figures of all variants: seconds, ratios to host's, and what was chosen.

    With `budget_s` there are as many blocks of each as take so long, and at most `num_blocks`.
    """
    trainees: dict[str, Trainee] = {}
    variants = [_variant(name, wrap, task, group, trainees) for name, wrap in wraps.items()]
    if budget_s is not None:
        num_blocks = rounds_within(budget_s, variants, group, num_steps, num_blocks)
    before = _statistics(trainees)
    blocks = alternate(variants, group, num_blocks, num_steps)
    figures = _figures(blocks, trainees, before) if group.rank == 0 else {}
    for trainee in trainees.values():
        if isinstance(trainee.parallel, DataParallel):
            trainee.parallel.close()
    trainees.clear()
    variants.clear()
    gc.collect()  # modules lie in cycles, and the memory of one case is needed for the next
    return figures


def _variant(
    name: str, wrap: Wrap, task: Task, group: Group, trainees: dict[str, Trainee]
) -> Variant:
    """Return a variant that is warm, and whose trainee, if this rank has one, is in `trainees`."""
    num_ranks = 1 if name == "lone" else group.world_size
    group.barrier()
    if group.rank >= num_ranks:
        return Variant(name, _never, num_ranks)
    trainees[name] = trainee = Trainee(task, wrap)
    for _ in range(_NUM_WARM_UP):
        trainee.step()
    if name.endswith("auto"):
        _settle(trainee, group)
    synchronize = device_of(group.device).synchronize
    return Variant(name, timed(trainee.step, 0, synchronize), num_ranks)


def _statistics(trainees: Mapping[str, Trainee]) -> dict[str, Statistics]:
    return {
        name: trainee.parallel.statistics()
        for name, trainee in trainees.items()
        if isinstance(trainee.parallel, DataParallel)
    }


def _never(num_times: int) -> list[float]:
    raise RuntimeError("this rank does not take part")


def _settle(trainee: Trainee, group: Group) -> None:
    """Take steps until neither exchanges nor sizes of chunks are tried any more."""
    parallel = trainee.parallel
    assert isinstance(parallel, DataParallel)
    before, now = -1, 0
    while now > before or "being tried" in parallel.why:
        for _ in range(_INTERVAL):
            trainee.step()
        before, now = now, group.gather(len(parallel.trials))[0]


def _exchange_of(before: Statistics, after: Statistics) -> dict[str, Any]:
    """Return what a step's exchange took between two moments, and how much of it was hidden."""
    num_steps = after.num_steps - before.num_steps
    figures = {"exchange": after.exchange, "chunk": after.chunk, "num_steps": num_steps}
    if None in (before.exposed_s, before.hidden_s, after.exposed_s, after.hidden_s):
        return figures  # torch's own reducer does not show it
    exposed_s, hidden_s = (
        (getattr(after, name) - getattr(before, name)) / num_steps
        for name in ("exposed_s", "hidden_s")
    )
    share = hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None
    return figures | {"exposed_s": exposed_s, "hidden_s": hidden_s, "hidden_share": share}


def _figures(
    blocks: Mapping[str, list[list[float]]],
    trainees: Mapping[str, Trainee],
    before: Mapping[str, Statistics],
) -> dict[str, Any]:
    rows = compare(blocks, "host")
    for name, row in compare(blocks, "lone").items():
        rows[name]["added_s"] = row["difference_s"]
        del rows[name]["difference_s"]
    for name, after in _statistics(trainees).items():
        rows[name]["exchange"] = _exchange_of(before[name], after)
    ddp = [name for name in rows if name.startswith("DDP")]
    figures: dict[str, Any] = {
        "variants": rows,
        "best_ddp": min(ddp, key=lambda name: rows[name]["seconds"]["median"]),
    }
    if "auto" in trainees:
        auto = trainees["auto"].parallel
        assert isinstance(auto, DataParallel)
        figures["why"] = auto.why
        figures["trials"] = [trial._asdict() for trial in auto.trials]
    return figures
