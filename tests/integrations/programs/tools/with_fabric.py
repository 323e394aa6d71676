"""Cases of Fabric, whose loops train with Paceline and with DDP."""

from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import FSDPPrecision
from lightning.fabric.strategies import DDPStrategy
from tool_cases import (
    MOVED,
    NUM_RANKS,
    ROUNDING,
    Net,
    batches,
    check_exchange,
    distance,
    exchange_of,
    sgd,
)
from torch import nn

import paceline
from paceline.integrations.fabric import PacelineStrategy
from refusals import refused as refuses


def fabric_of(strategy: object, **options: Any) -> Fabric:
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=NUM_RANKS, **options)
    fabric.launch()
    return fabric


def trained(fabric: Fabric, micro: int = 1, odd: bool = False) -> tuple[Net, nn.Module]:
    """Train with `micro` batches per step; return the module and its wrapper."""
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net))
    loader = fabric.setup_dataloaders(batches())
    model.eval()
    with torch.no_grad():
        model(next(iter(loader))[0])  # the first forward pass is an evaluation
    model.train()
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader, 1):
            with fabric.no_backward_sync(model, enabled=number % micro != 0):
                way = odd and number % 2 == 1
                fabric.backward((model(inputs, way) - targets).square().mean() / micro)
            if number % micro == 0:
                optimizer.step()
                optimizer.zero_grad()
    return net, model._forward_module


def beside_ddp(
    num_exchanges: int, ddp: object = "ddp", own: dict[str, Any] | None = None, **options: Any
) -> None:
    """Train with exchange "host" and with DDP, and compare."""
    precision = options.pop("precision", None)
    strategy = PacelineStrategy(exchange="host", **(own or {}))
    ours, wrapped = trained(fabric_of(strategy, precision=precision), **options)
    theirs, _ = trained(fabric_of(ddp, precision=precision), **options)
    assert distance(ours, theirs) <= ROUNDING
    check_exchange(exchange_of(wrapped), num_exchanges)


accumulated = partial(beside_ddp, 4, micro=2)
in_bfloat16 = partial(beside_ddp, 8, precision="bf16-mixed")


def with_a_layer_left_out() -> None:
    unused = {"find_unused_parameters": True}
    beside_ddp(8, DDPStrategy(**unused), unused, odd=True)


def saved_and_loaded() -> None:
    fabric = fabric_of("paceline")
    net, _ = trained(fabric)
    fabric.save("fabric.ckpt", {"model": net})
    fabric.barrier()
    other = fabric.setup_module(Net())
    moved = distance(other.module, net)
    fabric.load("fabric.ckpt", {"model": other})
    plain = Net()
    plain.load_state_dict(torch.load("fabric.ckpt")["model"])
    if fabric.global_rank == 0:  # Fabric saves only rank 0's buffers
        assert moved >= MOVED
        assert max(distance(other.module, net), distance(plain, net)) <= ROUNDING


def refused() -> None:
    with refuses("model"):
        fabric_of("paceline").setup_module(paceline.DataParallel(Net()))
    with refuses("precision"):
        fabric_of("paceline", plugins=FSDPPrecision("bf16-mixed")).setup_module(Net())
