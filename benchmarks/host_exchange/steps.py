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
from paceline.links.arena import Arena
from paceline.links.group import Group
from ranks import DEADLINE_S, Variant, alternate, compare, timed
from trainee import Task, Trainee, Wrap, synchronizer

_NUM_WARM_UP = 2  # DistributedDataParallel forms its buckets anew after its first step
_INTERVAL = 11  # steps in which a chunk search has measured another size, if it is not done
_BUCKETS_MB = (10, 25, 100)


class Together:
    """A model whose backward pass ends when all ranks have ended theirs, and exchanges nothing."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self._arena = Arena(group, 8, 1, 0, DEADLINE_S)
        self._arena.set_chunks([[]])
        self._steps = itertools.count(1)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Run the forward pass."""
        outputs: Tensor = self._model(inputs)
        outputs.register_hook(lambda _: Variable._execution_engine.queue_callback(self._meet))
        return outputs

    def _meet(self) -> None:
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
    task: Task, wraps: Mapping[str, Wrap], group: Group, num_blocks: int, num_steps: int
) -> dict[str, Any]:
    """Return the figures of all variants: seconds, ratios to host's, and what was chosen."""
    synchronize = synchronizer(group.device)
    trainees, variants = {}, []
    for name, wrap in wraps.items():
        num_ranks = 1 if name == "lone" else group.world_size
        group.barrier()
        if group.rank < num_ranks:
            trainees[name] = trainee = Trainee(task, wrap)
            for _ in range(_NUM_WARM_UP):
                trainee.step()
            if name == "auto":
                _settle(trainee, group)
            variants.append(Variant(name, timed(trainee.step, 0, synchronize), num_ranks))
        else:
            variants.append(Variant(name, _never, num_ranks))
    blocks = alternate(variants, group, num_blocks, num_steps)
    figures = _figures(blocks, trainees) if group.rank == 0 else {}
    for trainee in trainees.values():
        if isinstance(trainee.parallel, DataParallel):
            trainee.parallel.close()
    trainees.clear()
    variants.clear()
    gc.collect()  # modules lie in cycles, and the memory of one case is needed for the next
    return figures


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


def _figures(
    blocks: Mapping[str, list[list[float]]], trainees: Mapping[str, Trainee]
) -> dict[str, Any]:
    rows = compare(blocks, "host")
    for name, row in compare(blocks, "lone").items():
        rows[name]["added_s"] = row["difference_s"]
        del rows[name]["difference_s"]
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
