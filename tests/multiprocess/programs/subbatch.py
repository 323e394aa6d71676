"""Trainings of a model whose head is split, by the first 1, 2, 3 and 4 ranks, beside one process.

Rank 0 prints for each case what came of it on every rank.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_model
from subbatch_net import FEATURES, MOST, Net, batch, places, sizes_of, whole
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.functional import cross_entropy

from paceline.data.dataset import TensorSamples
from paceline.exchange import synchronized
from paceline.exchange.step import SGD, Share
from paceline.links.rendezvous import joined
from paceline.models import describe
from paceline.recipes.classification import accuracy
from paceline.record.clock import HostClock
from paceline.strategies.subbatch.build import split
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.evaluation import evaluate
from paceline.strategies.subbatch.layers import dropout_seed
from paceline.strategies.subbatch.recorder import HeadRecorder
from paceline.strategies.subbatch.state import load, save
from paceline.strategies.subbatch.trainer import SplitModel, SplitTrainer

SEED, NUM_STEPS = 3, 50
DEADLINE_S = 20.0
Build = Callable[[], nn.Module]


class Place:
    """The ranks of a case, and what trains on them."""

    def __init__(self, rank: int, size: int, **config: Any) -> None:
        self.rank, self.size = rank, size
        self.group = joined(torch.device("cpu"), DEADLINE_S)
        self.config = SubBatch(workers=size, head="head.0", **config)

    def trainer(self, build: Build, sgd: SGD) -> SplitTrainer:
        workload = describe(build(), torch.zeros(MOST, FEATURES), "net")
        model = split(build, workload, self.config, self.group, SEED)
        recorder = HeadRecorder(HostClock(), f"cpu{self.rank}", self.rank)
        return SplitTrainer(
            model, self.config, self.group, recorder, sgd.optimizer, sgd.learning_rate, SEED
        )

    def shares(self) -> Iterator[Share]:
        for step in range(NUM_STEPS):
            yield Share(*batch(self.rank, step), 1.0)


MOMENTUM = SGD(learning_rate=0.1, momentum=0.9)


def built(build: Build) -> nn.Module:
    torch.manual_seed(SEED)
    return build()


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


def compared(place: Place, model: SplitModel, path: Path, build: Build, oracle: nn.Module):
    """Save the model, read it in one process, and compare; rank 0 knows."""
    save(path, model.module, model.shardings, place.group)
    if place.rank:
        return None
    found = build()
    load_model(found, str(path))
    return distance(found, oracle)


def seeded(model: nn.Module) -> list[int]:
    """Have plain dropouts of a head draw what a run draws; the step is the list's only entry."""
    step = [0]

    def seeds(name: str) -> Callable[..., None]:
        def seed(*_: object) -> None:
            torch.manual_seed(dropout_seed(SEED, step[0], name))

        return seed

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(seeds(name))
    return step


def together(place: Place, num_steps: int) -> tuple[SplitTrainer, nn.Module, float]:
    """Train as one process with plain modules does beside it; return by how much losses differ."""
    trainer, source, size = place.trainer(Net, MOMENTUM), place.shares(), place.size
    oracle = built(Net)
    optimizer, step = MOMENTUM.optimizer(oracle), seeded(oracle)
    apart = 0.0
    for step[0] in range(num_steps):
        loss = float(trainer.step(source))
        inputs, targets = whole(size, step[0])
        optimizer.zero_grad()
        expected = cross_entropy(oracle(inputs), targets)
        expected.backward()
        optimizer.step()
        apart = max(apart, abs(loss / expected.item() - 1))
    return trainer, oracle, apart


def equal(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Once a step, no codec: as one process with plain modules, whatever the number of workers."""
    place = Place(rank, size)
    trainer, oracle, apart = together(place, NUM_STEPS)
    path = folder / f"equal{size}.safetensors"
    found = compared(place, trainer.model, path, Net, oracle)
    own = sum(p.numel() for layer in trainer.model.head for p in layer.parameters)
    tested = evaluate(trainer, TensorSamples(*whole(size, NUM_STEPS)), accuracy)
    oracle.eval()
    inputs, targets = whole(size, NUM_STEPS)
    scores = oracle(inputs)
    mine = slice(rank, None, size)
    right = int((scores.argmax(1) == targets)[mine].sum())
    test_loss = float(cross_entropy(scores[mine], targets[mine], reduction="sum"))
    trainer.close()
    return {
        "worst": found,
        "loss": apart,
        "own": own,
        "tested": [abs(tested[0] / test_loss - 1), tested[1] == right],
    }


def sized(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Sub-batches of any size train as one process does, and take the turns that they should."""
    found = {}
    for sub_batch in sizes_of(size):
        place = Place(rank, size, sub_batch=sub_batch)
        trainer, oracle, apart = together(place, 5)
        path = folder / f"sized{size}_{sub_batch}.safetensors"
        worst = compared(place, trainer.model, path, Net, oracle)
        found[sub_batch] = [worst, apart, trainer.sent_of_loss.activations_sent]
        trainer.close()
    return {"sized": found}


def by_passes(
    rank: int, size: int, folder: Path, updates: str, sub_batch: int | None = None
) -> dict[str, Any]:
    """A head with statistics, or updated per sub-batch, as one process takes the sub-batches."""

    def build() -> nn.Module:
        return Net(p=0.0, norm=updates == "step")

    sgd = SGD(learning_rate=0.05, momentum=0.9)
    place = Place(rank, size, updates=updates, sub_batch=sub_batch)
    num_passes = min(MOST, size if sub_batch is None else -(-size * MOST // sub_batch))
    trainer, source = place.trainer(build, sgd), place.shares()
    oracle = built(build)
    body, head = sgd.optimizer(oracle.body), sgd.optimizer(oracle.head)
    for step in range(6):
        trainer.step(source)
        inputs, targets = whole(size, step)
        activations = oracle.body(inputs)
        errors = torch.zeros_like(activations)
        for rows in places(size, step, num_passes):
            own = activations[rows].detach().requires_grad_()
            loss = cross_entropy(oracle.head(own), targets[rows])
            share = len(rows) / len(targets)
            if updates == "step":
                (loss * share).backward()
                errors[rows] = own.grad
            else:
                loss.backward()
                errors[rows] = own.grad * share
                head.step()
                head.zero_grad()
        activations.backward(errors)
        body.step()
        if updates == "step":
            head.step()
        for optimizer in (body, head):
            optimizer.zero_grad()
    found = compared(place, trainer.model, folder / f"{updates}{size}.safetensors", build, oracle)
    trainer.close()
    return {"worst": found}


def loaded(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Any number of ranks takes over what four have written."""
    trainer = Place(rank, size).trainer(Net, MOMENTUM)
    model, shardings = trainer.model.module, trainer.model.shardings
    load(folder / "equal4.safetensors", model, shardings, rank)
    found = Net()
    load_model(found, str(folder / "equal4.safetensors"))
    wrong = []
    for name, tensor in model.state_dict().items():
        own = shardings.get(name.rpartition(".")[0])
        expected = found.state_dict()[name]
        if own is not None:
            expected = own.shard(rank)(expected)
        if not torch.equal(tensor, expected):
            wrong.append(name)
    trainer.close()
    return {"wrong": wrong}


def encoded(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """All that travels is encoded: training goes on, and less is sent."""
    torch.set_default_dtype(torch.float32)
    sent, losses = {}, {}
    for name, config in {
        "plain": {},
        "dynamic8": dict.fromkeys(("activations", "activation_gradients", "gradients"), "dynamic8"),
    }.items():
        trainer = Place(rank, size, **config).trainer(Net, SGD(0.3, 0.9))
        source = Place(rank, size).shares()
        losses[name] = [float(trainer.step(source)) for _ in range(15)]
        sent[name] = trainer.sent_nbytes
        trainer.close()
    torch.set_default_dtype(torch.float64)
    apart = max(abs(a - b) for a, b in zip(losses["plain"], losses["dynamic8"], strict=True))
    return {"sent": sent, "apart": apart, "same": losses["dynamic8"]}


def poisoned(rank: int, size: int, folder: Path, layer: str) -> dict[str, Any]:
    """One rank's part of a layer becomes NaN: all say of which rank and layer."""
    trainer = Place(rank, size).trainer(Net, MOMENTUM)
    source = Place(rank, size).shares()
    trainer.step(source)
    if rank == size - 1:
        with torch.no_grad():
            trainer.model.module.get_submodule(layer).weight[0, 0] = torch.nan
    try:
        trainer.step(source)
    except Exception as error:
        return {"said": f"{type(error).__name__}: {error}"}
    return {"said": ""}


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "equal": equal,
    "each": lambda *place: by_passes(*place, updates="sub-batch"),
    "norm": lambda *place: by_passes(*place, updates="step"),
    "each_of_five": lambda *place: by_passes(*place, updates="sub-batch", sub_batch=5),
    "sized": sized,
    "loaded": loaded,
    "encoded": encoded,
    "poisoned_first": lambda *place: poisoned(*place, layer="head.0"),
    "poisoned_last": lambda *place: poisoned(*place, layer="head.6"),
}
SIZES = {"equal": (4, 3, 2, 1), "loaded": (1, 2, 3), "encoded": (3,)}


def main(folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=60)))
    for name, run in CASES.items():
        for size in SIZES.get(name, (2, 3)):
            key = f"{name}_{size}"
            outcome = "null"
            if rank < size:
                own = dist.PrefixStore(key, store)
                timeout = timedelta(seconds=DEADLINE_S)
                dist.init_process_group(
                    "gloo", store=own, rank=rank, world_size=size, timeout=timeout
                )
                # Ranks that were not in all cases have made fewer modules parallel.
                synchronized._numbers = itertools.count()
                try:
                    outcome = json.dumps(run(rank, size, folder))
                except Exception as error:
                    outcome = json.dumps({"error": f"{type(error).__name__}: {error}"})
                dist.destroy_process_group()
            store.set(f"{key}/{rank}", outcome)
            rows = [json.loads(store.get(f"{key}/{other}")) for other in range(size)]
            if rank == 0:
                print(json.dumps(["", key, rows]), flush=True)
    store.set(f"end/{rank}", "")
    if rank == 0:  # which may keep the store
        store.wait([f"end/{other}" for other in range(4)])
    sys.stdout.flush()
    os._exit(0)  # threads may still wait for a rank in a case that failed


main(Path.cwd())
