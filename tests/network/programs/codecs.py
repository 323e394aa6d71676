"""Cases of gradients that are encoded between two hosts, and the bytes that it takes.

Arguments: the folder of the programs that run on one machine, and names of cases.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, str(Path(__file__).parents[2]))

import codec_training
from codec_training import loss_of, means, momentum, network
from ranks import CASES, Place, batch, bits, case, main, quick

CASES.update(codec_training.CASES)
for _name in codec_training.WAITING:
    quick(codec_training.CASES[_name])

NUM_STEPS = 5


def _sent() -> int:
    """Bytes of all frames that this host has sent, when all ranks have come so far."""
    dist.barrier()
    interface = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"])
    return int((interface / "statistics" / "tx_bytes").read_text())


@case
def bytes_between(place: Place):
    """Train without a codec, with one, and with what pays; each after a step that makes chunks."""
    outcome = {}
    for codec in (None, "dynamic8", "half"):
        module, _ = place.build(lambda: nn.Sequential(nn.Linear(100, 3000), nn.Linear(3000, 10)))
        parallel = place.parallel(module, codec=codec)
        optimizer = momentum(parallel)
        before = 0
        for step in range(1 + NUM_STEPS):
            optimizer.zero_grad()
            inputs = batch(place.rank, step, 4, 100, dtype=torch.float32)
            parallel(inputs).square().mean().backward()
            optimizer.step()
            before = before or _sent()
        outcome[str(codec)] = _sent() - before
        outcome["count"] = sum(parameter.numel() for parameter in module.parameters())
        outcome[f"bits of {codec}"] = bits(module)
        parallel.close()
    return outcome


@case
def many_steps_of_one_bit(place: Place):
    """What the sum of all gradients lacks, and the largest of them, by the largest of a rank."""
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


if __name__ == "__main__":
    main(["host"], sys.argv[2].split(","))
