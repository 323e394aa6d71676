"""Train with encoded gradients between two hosts, and count the bytes sent.

The arguments are names of cases. Each case has its own process group, because an error on one rank
may break it. Rank 0 prints the outcomes of all ranks for each case.
"""

import gc
import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

sys.path.insert(0, str(Path(__file__).parents[2]))

from codec_cases import normal
from codec_training import CASES, WAITING, Place, bits, loss_of, means, momentum, network

NUM_STEPS = 5


def _sent() -> int:
    """Return the bytes of the frames that this host has sent, after a barrier."""
    dist.barrier()
    interface = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"])
    return int((interface / "statistics" / "tx_bytes").read_text())


def bytes_between(place: Place) -> dict[str, Any]:
    """Count the bytes of steps without a codec and with two; the first step is not counted."""
    outcome: dict[str, Any] = {}
    for codec in (None, "dynamic8", "half"):
        module, _ = place.build(lambda: nn.Sequential(nn.Linear(100, 3000), nn.Linear(3000, 10)))
        parallel = place.parallel(module, codec=codec)
        optimizer = momentum(parallel)
        before = 0
        for step in range(1 + NUM_STEPS):
            optimizer.zero_grad()
            inputs = normal(400, 1 + 1000 * place.rank + step).view(4, 100)
            parallel(inputs).square().mean().backward()
            optimizer.step()
            before = before or _sent()
        outcome[str(codec)] = _sent() - before
        outcome["count"] = sum(parameter.numel() for parameter in module.parameters())
        outcome[f"bits of {codec}"] = bits(module.parameters())
        parallel.close()
    return outcome


def many_steps_of_one_bit(place: Place) -> dict[str, Any]:
    """Return the summed error and the largest gradient, relative to the largest of any rank."""
    module, oracle = place.build(network)
    parallel = place.parallel(module, codec="onebit")
    lacks, largest = [torch.zeros_like(parameter) for parameter in module.parameters()], []
    for step in range(24):
        parallel.zero_grad()
        loss_of(parallel, place.rank, step).backward()
        exact, unit = means(place.size, oracle, lambda rank, at=step: [loss_of(oracle, rank, at)])
        for lack, parameter, mean in zip(lacks, module.parameters(), exact, strict=True):
            lack += mean - parameter.grad
            largest.append(float(parameter.grad.abs().max()) / unit)
    lacking = max(float(lack.abs().max()) for lack in lacks) / unit
    return {"lacking": lacking, "largest": max(largest)}


def outcome_of(name: str, place: Place) -> dict[str, Any]:
    own = {"bytes_between": bytes_between, "many_steps_of_one_bit": many_steps_of_one_bit}
    try:
        return (CASES | own)[name](place)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=60)))
    for name in names:
        place = Place(rank, size, "host", 2.0 if name in WAITING else 20.0)
        own, timeout = dist.PrefixStore(name, store), timedelta(seconds=place.deadline_s)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)
        outcome = json.dumps(outcome_of(name, place))
        gc.collect()  # frees models, which ends their threads
        dist.destroy_process_group()
        store.set(f"{name}/{rank}", outcome)
        # Wait for all ranks before the next case.
        rows = [json.loads(store.get(f"{name}/{other}")) for other in range(size)]
        if rank == 0:
            print(json.dumps([name, rows]), flush=True)
    store.set(f"end/{rank}", "")
    if rank == 0:  # may host the store
        store.wait([f"end/{other}" for other in range(size)])
    os._exit(0)  # threads of gloo may still wait for a rank that raised an error


if __name__ == "__main__":
    main(sys.argv[1:])
