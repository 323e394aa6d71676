"""AlexNet on two ranks, one core each: what a step takes and sends with each codec.

RATE in the environment says which wire joins them: "100mbit", "1gbit" or "loopback".
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline import DataParallel, ddp_hook
from paceline.exchange.all_reduce import HookState
from paceline.links.group import Group
from ranks import DEADLINE_S, Variant, alternate, compare, timed
from trainee import Task, Trainee, Wrap

_BATCH_SIZE = 16
_SETTLING = 24  # steps after which codec="auto" has decided
_SENT = Path("/sys/class/net/wire/statistics/tx_bytes")
_CASES = {"100mbit": (3, 1), "1gbit": (5, 2), "loopback": (5, 2)}  # blocks, and steps in each


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return seconds and bytes of all variants, and why codec "auto" has decided as it has."""
    rate = os.environ["RATE"]
    num_blocks, num_steps = (2, 1) if quick else _CASES[rate]
    states: dict[str, HookState] = {}
    task = Task.synthetic("alexnet", _BATCH_SIZE, group.device)
    variants, sent = [], {}
    for name, wrap in _wraps(states, rate, quick).items():
        trainee = Trainee(task, wrap)
        for _ in range(_SETTLING if name == "auto" else 2):
            trainee.step()
        sent[name] = counted = _Counted(timed(trainee.step))
        variants.append(Variant(name, counted, group.world_size))
    blocks = alternate(variants, group, num_blocks, num_steps)
    if group.rank:
        return {}
    rows = compare(blocks, "DDP 25 MB")
    for name, row in rows.items():
        row["sent_nbytes"] = median(sent[name].nbytes) if _SENT.exists() else None
    why = states["auto"].why if "auto" in states else None
    return {"variants": rows, "auto": why}


def _wraps(states: dict[str, HookState], rate: str, quick: bool) -> Mapping[str, Wrap]:
    """Return how each variant makes a model parallel; "apart" is two ranks that do not."""
    wraps: dict[str, Wrap] = {"apart": lambda model: model}
    for mb in (25,) if rate == "100mbit" else (25, 100):
        wraps[f"DDP {mb} MB"] = partial(_distributed, mb)
    if rate != "100mbit":
        wraps["a hook that sends nothing"] = _silent
    wraps["DDP 25 MB, fp16_compress_hook"] = partial(_in_half, 25)
    wraps["dynamic8"] = partial(_hooked, states, "dynamic8")
    wraps["e3m0"] = partial(_hooked, states, "e3m0")
    if rate != "100mbit" and not quick:
        wraps["auto"] = partial(_hooked, states, "auto")
    if rate != "loopback":
        wraps["host, dynamic8"] = partial(
            DataParallel, exchange="host", codec="dynamic8", chunk=1, deadline_s=DEADLINE_S
        )
    return wraps


def _distributed(mb: int, model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=True)


def _in_half(mb: int, model: nn.Module) -> DistributedDataParallel:
    parallel = _distributed(mb, model)
    parallel.register_comm_hook(None, fp16_compress_hook)
    return parallel


def _silent(model: nn.Module) -> DistributedDataParallel:
    """Return what DistributedDataParallel costs if the exchange itself costs nothing."""
    parallel = _distributed(25, model)
    parallel.register_comm_hook(None, _as_it_is)
    return parallel


def _as_it_is(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # exported, but not declared
) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _hooked(states: dict[str, HookState], codec: str, model: nn.Module) -> DistributedDataParallel:
    parallel = _distributed(25, model)
    states[codec], hook = ddp_hook(codec)
    parallel.register_comm_hook(states[codec], hook)
    return parallel


class _Counted:
    """Runs steps, and notes how many bytes each has sent over the wire."""

    def __init__(self, run: Callable[[int], list[float]]) -> None:
        self._run = run
        self.nbytes: list[float] = []

    def __call__(self, num_times: int) -> list[float]:
        before = _sent_nbytes()
        seconds = self._run(num_times)
        self.nbytes.append((_sent_nbytes() - before) / num_times)
        return seconds


def _sent_nbytes() -> int:
    return int(_SENT.read_text()) if _SENT.exists() else 0
