"""Compare hogbatch with torch's Hogwild recipe, and minibatch SGD in torch and TensorFlow."""

import json
import os
import subprocess
import sys
import time
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from cases import Goal, dataset, race, race_model, reached, seconds_to
from target import GOAL, QUICK_GOAL
from torch import nn

from paceline.links.cores import physical_cores
from paceline.training.data.sampler import shuffled
from paceline.training.recipes.losses import class_loss

_BATCH, _RATE = 64, 0.5
_WAITING_S = 300.0


def measure(quick: bool) -> dict[str, Any]:
    """Return each method's seconds per epoch and to the target loss."""
    goal = QUICK_GOAL if quick else GOAL
    common: dict[str, Any] = {"learning_rate": _RATE, "epochs": goal.epochs}
    return {
        "hogbatch, two workers": seconds_to(
            goal, race(quick, workers="cpu:1,cpu:1", options={"policy": "hogbatch"}, **common)
        ),
        "torch's Hogwild recipe, two processes": _recipe(2, goal, quick),
        "torch, one process": _recipe(1, goal, quick),
        "TensorFlow, one process": _tensorflow(goal, quick),
    }


def _tensorflow(goal: Goal, quick: bool) -> dict[str, Any]:
    """Train the same network in TensorFlow, if TENSORFLOW_PYTHON names an interpreter."""
    python = os.environ.get("TENSORFLOW_PYTHON")
    if python is None:
        sys.stderr.write("TensorFlow is left out: TENSORFLOW_PYTHON names no interpreter with it\n")
        return {"seconds": None, "epoch_s": None}
    data = dataset(quick, 0)
    model = race_model(quick)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    (inputs, targets), (test_inputs, test_targets) = (
        part.__getitems__(range(len(part))) for part in (data.train, data.test)
    )
    arrays = {"inputs": inputs, "targets": targets}
    arrays |= {"test_inputs": test_inputs, "test_targets": test_targets}
    arrays |= {f"w{i}": layer.weight.detach().T for i, layer in enumerate(layers)}
    arrays |= {f"b{i}": layer.bias.detach() for i, layer in enumerate(layers)}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "problem.npz"
        np.savez(file, layers=len(layers), **{name: one.numpy() for name, one in arrays.items()})
        words = [str(one) for one in (file, _RATE, _BATCH, goal.epochs, goal.loss)]
        done = subprocess.run(
            [python, str(Path(__file__).with_name("tf_sgd.py")), *words],
            capture_output=True,
            text=True,
            timeout=_WAITING_S,
            check=True,
        )
    return reached(goal, log(data.num_classes), json.loads(done.stdout)["tested"])


def _recipe(num_processes: int, goal: Goal, quick: bool) -> dict[str, float | None]:
    """Train as in torch's Hogwild example: share_memory(), and one optimizer per process."""
    context = mp.get_context("spawn")
    model = race_model(quick)
    model.share_memory()
    barrier, stop = context.Barrier(num_processes + 1), context.Event()
    processes = [
        context.Process(target=_train, args=(rank, num_processes, model, barrier, stop, quick))
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        barrier.wait(_WAITING_S)
        return _supervise(model, barrier, stop, goal, quick)
    finally:
        stop.set()
        barrier.abort()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _supervise(
    model: nn.Module, barrier: Any, stop: Any, goal: Goal, quick: bool
) -> dict[str, float | None]:
    tested: list[tuple[float, float]] = []
    data = dataset(quick, 0)
    inputs, targets = data.test.__getitems__(range(len(data.test)))
    for _ in range(goal.epochs):
        barrier.wait(_WAITING_S)
        began = time.monotonic()
        barrier.wait(_WAITING_S)
        seconds = time.monotonic() - began
        with torch.no_grad():
            tested.append((seconds, float(class_loss(model(inputs), targets))))
        if tested[-1][1] <= goal.loss:
            break
    return reached(goal, log(data.num_classes), tested)


def _train(
    rank: int, world_size: int, model: nn.Module, barrier: Any, stop: Any, quick: bool
) -> None:
    from threading import BrokenBarrierError

    cores = physical_cores(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank % len(cores)])
    torch.set_num_threads(1)
    samples = dataset(quick, 0).train
    optimizer = torch.optim.SGD(model.parameters(), _RATE)
    try:
        barrier.wait(_WAITING_S)
        epoch = 0
        while not stop.is_set():
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
