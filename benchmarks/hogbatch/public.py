"""Compare hogbatch with torch's Hogwild recipe, and with minibatch SGD in one torch process."""

import os
import time
from threading import BrokenBarrierError
from typing import Any

import torch
import torch.multiprocessing as mp
from cases import dataset, goal_of, race, race_settings, reached, seconds_to
from target import shown
from torch import nn

from figures import table
from paceline.links.cores import physical_cores
from paceline.training.data.sampler import shuffled
from paceline.training.models import find
from paceline.training.recipes.losses import class_loss

_BATCH, _RATE = 64, 0.5
_WAITING_S = 300.0


def measure(quick: bool) -> dict[str, Any]:
    """Return each method's seconds per epoch and to the target loss."""
    given: dict[str, Any] = {"workers": "cpu:1,cpu:1", "options": {"policy": "hogbatch"}}
    wanted = race_settings(quick, learning_rate=_RATE, **given)
    return {
        "hogbatch, two workers": seconds_to(goal_of(quick), wanted),
        "torch's Hogwild recipe, two processes": _recipe(2, quick),
        "torch, one process": _recipe(1, quick),
    }


def _recipe(num_processes: int, quick: bool) -> dict[str, float | None]:
    """Train as in torch's Hogwild example: share_memory(), and one optimizer per process."""
    context = mp.get_context("spawn")
    name, data = race(quick)
    torch.manual_seed(0)
    model = find(name).build(dataset(data, 0).num_classes)
    model.share_memory()
    barrier = context.Barrier(num_processes + 1)
    processes = [
        context.Process(target=_train, args=(rank, num_processes, model, barrier, data))
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        barrier.wait(_WAITING_S)
        return _supervise(model, barrier, data, quick)
    finally:
        barrier.abort()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _supervise(model: nn.Module, barrier: Any, data: str, quick: bool) -> dict[str, float | None]:
    """Time epochs of the processes, and test the loss between them."""
    tested: list[tuple[float, float]] = []
    goal, loaded = goal_of(quick), dataset(data, 0)
    inputs, targets = loaded.test.__getitems__(range(len(loaded.test)))
    for _ in range(goal.epochs):
        barrier.wait(_WAITING_S)
        began = time.monotonic()
        barrier.wait(_WAITING_S)
        seconds = time.monotonic() - began
        with torch.no_grad():
            tested.append((seconds, float(class_loss(model(inputs), targets))))
        if tested[-1][1] <= goal.loss:
            break
    return reached(goal, loaded.num_classes, tested)


def _train(rank: int, world_size: int, model: nn.Module, barrier: Any, data: str) -> None:
    """Train epochs until the barrier is broken."""
    cores = physical_cores(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank % len(cores)])
    torch.set_num_threads(1)
    samples = dataset(data, 0).train
    optimizer = torch.optim.SGD(model.parameters(), _RATE)
    epoch = 0
    try:
        barrier.wait(_WAITING_S)
        while True:
            barrier.wait(_WAITING_S)
            order = torch.from_numpy(shuffled(len(samples), 0, epoch))
            for rows in order[rank::world_size].split(_BATCH):
                inputs, targets = samples.__getitems__(rows)
                class_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            barrier.wait(_WAITING_S)
            epoch += 1
    except BrokenBarrierError:
        return


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    rows = [(way, shown(row["epoch_s"]), shown(row["seconds"])) for way, row in figures.items()]
    return table("Public alternatives", ("way", "s an epoch", "s to the target"), rows)
