"""Cases that all ranks run one after another, each in a process group of its own.

A case that leaves its process group broken, as a refusal on one rank does, harms no other case.
"""

import copy
import gc
import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from paceline import DataParallel
from paceline.devices import device_of, gpus
from paceline.devices.simulated import SimulatedDevice

DEADLINE_S = 20.0
QUICK_S = 2.0  # of cases in which a rank waits in vain
BATCH = 4

Loss = Callable[[nn.Module, int, int], Tensor]  # of a model, on the samples of (rank, step)


@cache
def device() -> torch.device:
    """The device of this rank's models: a simulated GPU, if the environment says so.

    It is not made the current one, which stays the first.
    """
    own = int(os.environ.get("LOCAL_RANK", "0"))
    return gpus()[own] if gpus() else torch.device("cpu")


class Place:
    """A rank in a case: how it makes models, makes them parallel, and compares them."""

    def __init__(self, rank: int, size: int, exchange: str, deadline_s: float) -> None:
        self.rank, self.size, self.exchange = rank, size, exchange
        self.deadline_s = deadline_s

    def build(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
        """Return a module with this rank's own values, and one with those of rank 0."""
        with torch.device(device()):  # and not moved there, which would leave hooks behind
            torch.manual_seed(self.rank)
            module = make()
            torch.manual_seed(0)
            return module, make()

    def parallel(self, module: nn.Module, **options: Any) -> DataParallel:
        options = {"exchange": self.exchange, "chunk": 1, "deadline_s": self.deadline_s} | options
        return DataParallel(module, **options)

    def mean(self, loss: Loss, oracle: nn.Module, step: int) -> Tensor:
        """The loss over the samples of all ranks: what one process would minimise."""
        losses = [loss(oracle, rank, step) for rank in range(self.size)]
        return torch.stack(losses).mean()


Case = Callable[[Place], dict[str, Any]]
CASES: dict[str, Case] = {}
_DEADLINES: dict[str, float] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def quick(function: Case) -> Case:
    """A case in which some rank may wait in vain for another."""
    _DEADLINES[function.__name__] = QUICK_S
    return case(function)


def batch(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The samples of a rank in a step, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(1 + 1000 * rank + step)
    return torch.randn(*(shape or (BATCH, 6)), generator=generator, dtype=dtype).to(device())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Momentum and decay move a parameter whose gradient is zero, but not one that has none."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def square(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def trained(
    place: Place,
    make: Callable[[], nn.Module],
    loss: Loss = square,
    steps: int = 4,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    at_step: Callable[[nn.Module, int], None] = lambda module, step: None,
    **options: Any,
) -> dict[str, Any]:
    """Train a model on all ranks and its oracle on this one, and compare them.

    `wrap` is applied to the parallel model; `at_step` is called with both before each step;
    `options` are those of the parallel model.
    """
    module, oracle = place.build(make)
    parallel = wrap(place.parallel(module, **options))
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(steps):
        at_step(module, step)
        at_step(oracle, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(parallel, place.rank, step).backward()
        place.mean(loss, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


def settled(parallel: nn.Module, oracle: nn.Module, **more: Any) -> dict[str, Any]:
    """Compare a model that was trained in parallel with its oracle."""
    pairs = zip(parallel.parameters(), oracle.parameters(), strict=True)
    return {"worst": max(distance(*pair) for pair in pairs), "bits": bits(parallel), **more}


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value; NaN if there is one."""
    apart = (one.detach().double() - other.detach().double()).abs().max()
    return float(apart / other.detach().double().abs().max().clamp(min=1e-3))


def bits(model: nn.Module | Iterable[Tensor]) -> str:
    tensors = model.parameters() if isinstance(model, nn.Module) else model
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().flatten().clone().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def oracle_of(module: nn.Module) -> nn.Module:
    """A module with the same values and no hooks."""
    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        parameter.grad = None
    return copied


def main(exchanges: Iterable[str], names: Iterable[str] = ()) -> None:
    """Run the cases with each exchange; for each, rank 0 prints what came of it on every rank."""
    warnings.simplefilter("ignore")
    gc.freeze()
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=60)))
    for exchange in exchanges:
        for name in names or CASES:
            key = f"{exchange}/{name}"
            deadline_s = _DEADLINES.get(name, DEADLINE_S)
            place = Place(rank, size, exchange, deadline_s)
            own = dist.PrefixStore(key, store)
            dist.init_process_group(
                "gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=deadline_s)
            )
            outcome = json.dumps(_outcome(CASES[name], place))
            gc.collect()  # models go, and their threads with them
            gc.freeze()  # what is left need not be looked at again
            dist.destroy_process_group()
            store.set(f"{key}/{rank}", outcome)
            # All begin the next case together, however this one ended.
            rows = [json.loads(store.get(f"{key}/{other}")) for other in range(size)]
            if rank == 0:
                print(json.dumps([exchange, name, rows]), flush=True)
    store.set(f"end/{rank}", "")
    if rank == 0:  # which may keep the store
        store.wait([f"end/{other}" for other in range(size)])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still wait for a rank in a case that was refused


def _outcome(case: Case, place: Place) -> dict[str, Any]:
    own = device_of(device())
    try:
        outcome = case(place)
        own.synchronize()  # raises what went wrong on a device after the last wait for it
        return outcome
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        if isinstance(own, SimulatedDevice):
            own.await_all()
            own.errors.clear()


def all_nan(tensors: Iterable[Tensor]) -> bool:
    return all(math.isnan(value) for tensor in tensors for value in tensor.flatten().tolist())
