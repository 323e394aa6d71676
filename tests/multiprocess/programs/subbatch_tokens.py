"""Trainings of a language model whose head is split by its vocabulary, beside one process.

Rank 0 prints for each case what came of it on every rank, in float64.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_model
from subbatch_tokens_net import MOST, TOKENS, Language, count_of, samples
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.optim.lr_scheduler import CosineAnnealingLR

from paceline.core.calibration import LinearTime, linked_in_ring
from paceline.core.compare import conform
from paceline.core.strategy import Window
from paceline.data.dataset import TensorSamples
from paceline.exchange import synchronized
from paceline.exchange.step import Learning, Share
from paceline.links.rendezvous import joined
from paceline.measure.this_machine import Speed, this_machine
from paceline.models import describe
from paceline.recipes.losses import bits_per_byte, next_token_loss
from paceline.record.clock import HostClock
from paceline.record.merge import clock_offset, gather_timeline
from paceline.strategies.subbatch.build import split
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.evaluation import evaluate
from paceline.strategies.subbatch.plan import plan
from paceline.strategies.subbatch.profile import planned_nbytes
from paceline.strategies.subbatch.recorder import HeadRecorder
from paceline.strategies.subbatch.state import save
from paceline.strategies.subbatch.trainer import SplitTrainer

SEED, NUM_STEPS = 3, 8
DEADLINE_S = 20.0
HEADER = 40
# The gradients of attention's key biases are zero but for rounding, which a small eps would raise.
ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-6)
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
Make = Callable[..., torch.optim.Optimizer]


def scheduled(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, NUM_STEPS)


class Training:
    """This rank's part of a training, and its batches."""

    def __init__(self, rank: int, size: int, make: Make, **more: Any) -> None:
        self.rank, self.size = rank, size
        self.group = joined(torch.device("cpu"), DEADLINE_S)
        self.build = more.pop("build", Language)
        learning = Learning(next_token_loss, **more.pop("learning", {}))
        schedule = more.pop("schedule", lambda optimizer: None)
        self.is_masked = more.pop("is_masked", False)
        self.config = SubBatch(workers=size, **more)
        most = -(-MOST // size)
        tokens, mask, _ = samples(0, most)
        inputs = {"tokens": tokens, "mask": mask} if self.is_masked else tokens
        self.workload = describe(self.build(), inputs, "language")
        self.model = split(self.build, self.workload, self.config, self.group, SEED, inputs)
        self.recorder = HeadRecorder(HostClock(), f"cpu{rank}", rank)
        self.trainer = SplitTrainer(
            *(self.model, self.config, self.group, self.recorder),
            lambda module: make(module.parameters()),
            learning=learning,
            schedule=schedule,
        )

    def shares(self, first: int = 0, count: Callable[[int], int] = count_of) -> Iterator[Share]:
        for step in itertools.count(first):
            tokens, mask, targets = (
                part.tensor_split(self.size)[self.rank] for part in samples(step, count(step))
            )
            inputs = {"mask": mask, "tokens": tokens} if self.is_masked else tokens
            yield Share(inputs, targets, 1.0)

    def close(self) -> None:
        self.trainer.close()

    def apart(self, path: Path, oracle: nn.Module) -> float | None:
        """The largest difference from a whole model, as rank 0 knows it."""
        save(path, self.model.module, self.model.shardings, self.group)
        if self.rank:
            return None
        found = self.build()
        load_model(found, str(path))
        pairs = zip(found.parameters(), oracle.parameters(), strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs)


def equal(rank: int, size: int, folder: Path, make: Make, **more: Any) -> dict[str, Any]:
    """As one process with the whole batch: parameters, losses of steps, tests."""
    learning, schedule = more.get("learning", {}), more.get("schedule")
    training = Training(rank, size, make, **more)
    torch.manual_seed(SEED)
    oracle = training.build()
    optimizer = make(oracle.parameters())
    of_oracle = schedule(optimizer) if schedule else None
    source, apart = training.shares(), 0.0
    for step in range(NUM_STEPS):
        loss = float(training.trainer.step(source))
        tokens, mask, targets = samples(step, count_of(step))
        outputs = oracle(tokens, mask) if training.is_masked else oracle(tokens)
        expected = next_token_loss(outputs, targets)
        optimizer.zero_grad()
        expected.backward()
        if "clip_norm" in learning:
            nn.utils.clip_grad_norm_(oracle.parameters(), learning["clip_norm"])
        optimizer.step()
        if of_oracle:
            of_oracle.step()
        apart = max(apart, abs(loss - expected.item()))
    worst = training.apart(folder / f"{os.getpid()}.safetensors", oracle)
    found = {"worst": worst, "loss": apart}
    if not training.is_masked:
        found |= tested(training, oracle)
    training.close()
    return found


def tested(training: Training, oracle: nn.Module) -> dict[str, float]:
    """Errors of sums over all ranks: the loss, a score of parts, and one that needs the logits."""
    tokens, _, targets = samples(99, 11)
    data = TensorSamples(tokens, targets)
    with torch.no_grad():
        logits = oracle(tokens)

    def largest(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.amax((1, 2)).mean()  # no cross entropy, and alike for each sample

    errors = {}
    for score in (bits_per_byte, largest):
        found = training.group.gather(list(evaluate(training.trainer, data, score)))
        loss, value = (sum(column) / len(data) for column in zip(*found, strict=True))
        errors["test_loss"] = abs(loss - float(next_token_loss(logits, targets)))
        errors[score.__name__] = abs(value - float(score(logits, targets)))
    return errors


def each(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """The head is updated with the mean loss of each sub-batch, the body once a step."""
    training = Training(rank, size, SGD, updates="sub-batch")
    torch.manual_seed(SEED)
    oracle = training.build()
    head = SGD(oracle.head.parameters())
    body = SGD([one for name, one in oracle.named_parameters() if not name.startswith("head")])
    source = training.shares()
    for step in range(4):
        training.trainer.step(source)
        tokens, _, targets = samples(step, count_of(step))
        kept = list[torch.Tensor]()
        hook = oracle.head.register_forward_pre_hook(
            lambda _, args, kept=kept: kept.append(args[0])
        )
        oracle(tokens)
        hook.remove()
        [activations] = kept
        places = torch.arange(len(tokens)).tensor_split(size)
        errors, whole = torch.zeros_like(activations), (targets != -100).sum()
        for number in range(min(size, -(-MOST // size))):
            rows = torch.cat([one.tensor_split(size)[number] for one in places])
            own = activations[rows].detach().requires_grad_()
            counted = (targets[rows] != -100).sum()
            if not counted:
                continue
            loss = next_token_loss(oracle.head(own), targets[rows])
            loss.backward()
            errors[rows] = own.grad * counted / whole
            head.step()
            head.zero_grad()
        activations.backward(errors)
        body.step()
        body.zero_grad()
    worst = training.apart(folder / f"{os.getpid()}.safetensors", oracle)
    training.close()
    return {"worst": worst}


def encoded(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Activations, their gradients and those of the body travel encoded."""
    torch.set_default_dtype(torch.float32)
    losses = {}
    for codec in (None, "dynamic8"):
        codecs = dict.fromkeys(("activations", "activation_gradients", "gradients"), codec)
        training = Training(rank, size, partial(torch.optim.SGD, lr=0.1), **codecs)
        source = training.shares()
        losses[str(codec)] = [float(training.trainer.step(source)) for _ in range(15)]
        training.close()
    torch.set_default_dtype(torch.float64)
    pairs = zip(*losses.values(), strict=True)
    return {"same": losses["dynamic8"], "apart": max(abs(a - b) for a, b in pairs)}


def bfloat16(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """As one process under autocast: losses, and the types of what is kept."""
    torch.set_default_dtype(torch.float32)
    make = partial(torch.optim.AdamW, lr=0.01)
    training = Training(rank, size, make, learning={"bfloat16": True})
    types = set()
    linear = nn.functional.linear

    def spied(*args: Any) -> torch.Tensor:
        outputs = linear(*args)
        types.add(str(outputs.dtype))
        return outputs

    nn.functional.linear = spied
    torch.manual_seed(SEED)
    oracle = training.build()
    optimizer = make(oracle.parameters())
    source, ours, expected = training.shares(), [], []
    for step in range(NUM_STEPS):
        nn.functional.linear = spied
        ours.append(float(training.trainer.step(source)))
        nn.functional.linear = linear
        tokens, _, targets = samples(step, count_of(step))
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(oracle(tokens).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    kept = {str(one.dtype) for one in training.model.module.parameters()}
    training.close()
    codecs = dict.fromkeys(("activations", "activation_gradients"), "bfloat16")
    other = Training(rank, size, make, learning={"bfloat16": True}, **codecs)
    source = other.shares()
    encoded = [float(other.trainer.step(source)) for _ in range(NUM_STEPS)]
    other.close()
    torch.set_default_dtype(torch.float64)
    apart = max(abs(a - b) for a, b in zip(ours, expected, strict=True))
    return {
        "apart": apart,
        "types": sorted(types),
        "kept": sorted(kept),
        "encoded": encoded == ours,
    }


def planned(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A traced run conforms to its plan, and sends the bytes that are planned."""
    torch.set_default_dtype(torch.float32)
    training = Training(rank, size, SGD)
    trainer, source = training.trainer, training.shares(count=lambda step: -(-MOST // size) * size)
    machine = this_machine(training.group, [Speed(1e9, 1e9)] * size)
    linked = linked_in_ring(machine, machine.devices, LinearTime(0.0, 1e-9))
    recorder = HeadRecorder(HostClock(), machine.devices[rank].name, rank)
    trainer = SplitTrainer(
        *(training.model, training.config, training.group, recorder),
        lambda module: SGD(module.parameters()),
    )
    for _ in range(3):
        trainer.step(source)
    trainer.replica.record(recorder)
    recorder.start_trace(training.model.body)
    for _ in range(4):
        trainer.step(source)
    recorder.stop_trace()
    group = training.group
    timeline = gather_timeline(recorder.spans(), clock_offset(group), group)
    faults = conform(plan(training.workload, linked, training.config, Window(4)), timeline, 1.0)
    to_send = planned_nbytes(training.workload, machine, training.config)
    num_passes = training.config.num_sub_batches(training.model.batch_size)
    others = size - 1
    messages = {
        "activations": num_passes * others,
        "activation_gradients": num_passes * others,
        "loss": (num_passes + 1) * others,
        "gradients": 0,
    }
    sent = {name: nbytes - HEADER * messages[name] for name, nbytes in trainer.sent_nbytes.items()}
    torch.set_default_dtype(torch.float64)
    return {"faults": faults, "sent": sent, "planned": to_send, "rows": TOKENS}


def left(rank: int, size: int, folder: Path, make: Make, **more: Any) -> dict[str, Any]:
    """Five steps, after which the state is written down; and five more."""
    torch.set_default_dtype(torch.float32)
    training = Training(rank, size, make, schedule=scheduled, **more)
    source = training.shares(count=lambda step: 6)
    for _ in range(5):
        training.trainer.step(source)
    state = training.trainer.gather_state()
    if state is not None:
        torch.save(state, folder / "state.pt")
    torch.save(training.trainer.gradients.state(), folder / f"feedback{rank}.pt")
    losses = [float(training.trainer.step(source)) for _ in range(5)]
    return ended(training, folder, losses)


def went_on(rank: int, size: int, folder: Path, make: Make, **more: Any) -> dict[str, Any]:
    """Another training with the state that was written down."""
    torch.set_default_dtype(torch.float32)
    training = Training(rank, size, make, schedule=scheduled, **more)
    source = training.shares(5, count=lambda step: 6)
    next(training.shares())  # a step of another run's batches changes nothing
    training.trainer.load_state(torch.load(folder / "state.pt", weights_only=False))
    if size == 2:
        feedback = torch.load(folder / f"feedback{rank}.pt")
        training.trainer.gradients.load_state(feedback)
    losses = [float(training.trainer.step(source)) for _ in range(5)]
    return ended(training, folder, losses)


def ended(training: Training, folder: Path, losses: list[float]) -> dict[str, Any]:
    state = training.trainer.gather_state()
    training.close()
    torch.set_default_dtype(torch.float64)
    if state is None:
        return {}
    tensors = dict(state.tensors)
    for name, optimizer in state.optimizers.items():
        for number, values in optimizer["state"].items():
            tensors |= {f"{name}/{number}/{key}": torch.as_tensor(v) for key, v in values.items()}
    numbers = {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
    return {"tensors": numbers, "losses": losses, "steps": state.num_steps}


CLIPPED = {"clip_norm": 0.05}
MASKED = {"is_masked": True, "build": partial(Language, bias=True)}
CASES: dict[str, tuple[tuple[int, ...], Callable[..., dict[str, Any]]]] = {
    "adamw": ((1, 2, 3), partial(equal, make=ADAMW)),
    "sgd": ((2, 3), partial(equal, make=SGD)),
    "clipped": ((2, 3), partial(equal, make=SGD, learning=CLIPPED, schedule=scheduled)),
    "masked": ((2, 3), partial(equal, make=ADAMW, **MASKED)),
    "each": ((2, 3), each),
    "encoded": ((3,), encoded),
    "bfloat16": ((1, 2), bfloat16),
    "planned": ((2, 3), planned),
    "left": ((2,), partial(left, make=ADAMW)),
    "went_on": ((2, 3, 1), partial(went_on, make=ADAMW)),
    "left_each": ((2,), partial(left, make=SGD, updates="sub-batch")),
    "went_on_each": ((2,), partial(went_on, make=SGD, updates="sub-batch")),
    "left_onebit": ((2,), partial(left, make=SGD, gradients="onebit")),
    "went_on_onebit": ((2,), partial(went_on, make=SGD, gradients="onebit")),
}


def main(folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=60)))
    for name, (sizes, run) in CASES.items():
        for size in sizes:
            key, outcome = f"{name}_{size}", "null"
            if rank < size:
                own, timeout = dist.PrefixStore(key, store), timedelta(seconds=DEADLINE_S)
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
        store.wait([f"end/{other}" for other in range(3)])
    sys.stdout.flush()
    os._exit(0)  # threads may still wait for a rank in a case that failed


main(Path.cwd())
