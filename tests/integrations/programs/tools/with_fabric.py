"""Cases of Fabric, whose loops train with Paceline and with DDP."""

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import FSDPPrecision
from lightning.fabric.strategies import DDPStrategy
from torch import nn

import paceline
from paceline.integrations.fabric import PacelineStrategy
from pair import NUM_RANKS, Net, batches, case, cases, distance, error_of, exchange_of, main, sgd


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


def beside_ddp(strategy: object, ddp: object = "ddp", **options: Any) -> dict[str, Any]:
    precision = options.pop("precision", None)
    ours, wrapped = trained(fabric_of(strategy, precision=precision), **options)
    theirs, _ = trained(fabric_of(ddp, precision=precision), **options)
    return {"worst": distance(ours, theirs), **exchange_of(wrapped)}


cases(
    accumulated=lambda: beside_ddp(PacelineStrategy(exchange="host"), micro=2),
    with_a_layer_left_out=lambda: beside_ddp(
        PacelineStrategy(exchange="host", find_unused_parameters=True),
        DDPStrategy(find_unused_parameters=True),
        odd=True,
    ),
    in_bfloat16=lambda: beside_ddp(PacelineStrategy(exchange="host"), precision="bf16-mixed"),
)


@case
def saved_and_loaded() -> dict[str, Any]:
    fabric = fabric_of("paceline")
    net, _ = trained(fabric)
    fabric.save("fabric.ckpt", {"model": net})
    fabric.barrier()
    other = fabric.setup_module(Net())
    moved = distance(other.module, net)
    fabric.load("fabric.ckpt", {"model": other})
    plain = Net()
    plain.load_state_dict(torch.load("fabric.ckpt")["model"])
    if fabric.global_rank != 0:  # Fabric saves only rank 0's buffers
        return {}
    worst, loaded = distance(other.module, net), distance(plain, net)
    return {"moved": moved, "worst": worst, "loaded": loaded}


@case
def refused() -> dict[str, Any]:
    attempts = [
        lambda: fabric_of("paceline").setup_module(paceline.DataParallel(Net())),
        lambda: fabric_of("paceline", plugins=FSDPPrecision("bf16-mixed")).setup_module(Net()),
    ]
    return {"errors": [error_of(attempt) for attempt in attempts]}


main()
