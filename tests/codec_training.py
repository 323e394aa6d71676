"""Training with encoded gradients on ranks, and error bounds of these gradients.

A case of `CASES` is a function of a `Place`. Cases run on a pair of ranks of this machine, and in
programs on two hosts.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from codec_cases import normal
from paceline import DataParallel
from paceline.codecs.quantization import table
from paceline.core.errors import NonFinite

ROUNDING = 1e-5  # float32 rounding in sums of some hundred values
POISONED, NUM_STEPS = 2, 6  # the step with a non-finite gradient on the last rank
Build = Callable[[], nn.Module]


@dataclass
class Place:
    """A rank that builds models and wraps them in DataParallel."""

    rank: int
    size: int
    exchange: str = "allreduce"
    deadline_s: float = 20.0

    @classmethod
    def here(cls, **options: Any) -> "Place":
        return cls(dist.get_rank(), dist.get_world_size(), **options)

    def build(self, make: Build) -> tuple[nn.Module, nn.Module]:
        """Return a module with this rank's initial values, and one with those of rank 0."""
        torch.manual_seed(self.rank)
        module = make()
        torch.manual_seed(0)
        return module, make()

    def parallel(self, module: nn.Module, **options: Any) -> DataParallel:
        known = {"exchange": self.exchange, "chunk": 1, "deadline_s": self.deadline_s}
        return DataParallel(module, **known | options)


def network() -> nn.Module:
    """Return layers whose gradients need various padding to multiples of 64 bytes."""
    return nn.Sequential(
        *(nn.Linear(20, 301), nn.Tanh(), nn.Linear(301, 33), nn.Tanh()),
        *(nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 3)),
    )


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(normal(16 * 20, 1 + 1000 * rank + step).view(16, 20).to(dtype)).square().mean()


def momentum(module: nn.Module | Iterator[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return SGD that changes parameters with a zero gradient, but not those with None."""
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, **options)


def bits(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().flatten().clone().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def same(outcomes: list[Any]) -> Any:
    """Return the outcome of all ranks, which must be equal."""
    for outcome in outcomes:
        assert outcome == outcomes[0]
    return outcomes[0]


def check_poisoned(outcomes: list[dict[str, Any]], raising: list[int], num_skipped: int) -> None:
    """Check training that skips the poisoned step on every rank; `raising`: optimizers."""
    outcome = same(outcomes)
    assert outcome["changed"] == [step != POISONED for step in range(NUM_STEPS)]
    assert outcome["raised"] == [[POISONED, number] for number in raising]
    assert outcome["num_skipped"] == num_skipped
    assert outcome["bits"] == outcome["without"]


def state(module: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    """Return a digest of the parameters and of the optimizers' state."""
    tensors = list(module.parameters())
    for optimizer in optimizers:
        for kept in optimizer.state.values():
            tensors += [value for value in kept.values() if isinstance(value, Tensor)]
    return bits(tensors)


def trained(
    place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> str:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, place.rank, step).backward()
        optimizer.step()
    return state(model, optimizer)


def largest_error(codec: str) -> float:
    """Return the largest rounding error in [-1, 1]: half a gap, or the range above the table."""
    magnitudes = table(codec).magnitudes.double()
    return float(torch.cat([magnitudes.diff() / 2, 1 - magnitudes[-1:]]).max())


def means(size: int, model: nn.Module, losses: Callable[[int], list[Tensor]]):
    """Return the mean gradients of all ranks, and the largest gradient of any rank."""
    parameters = list(model.parameters())
    every = [
        torch.autograd.grad(torch.stack(losses(rank)).sum(), parameters) for rank in range(size)
    ]
    largest = max(float(g.abs().max()) for gradients in every for g in gradients)
    return [torch.stack(one).float().mean(0) for one in zip(*every, strict=True)], largest


def compared(
    place: Place, parallel: nn.Module, codec: str, steps: int = 5, accumulates: bool = True
) -> dict[str, Any]:
    """Train, and compare the gradients of each step with the exact means.

    `accumulates`: every other step has two micro-batches. `worst` is the largest error relative to
    its bound: encoding for the owner loses at most E times the largest gradient G. The mean is at
    most (1 + E) G, and loses E times as much on its way to all ranks. So the bound is (2 + E) E G,
    plus rounding.
    """
    oracle = copy.deepcopy(getattr(parallel, "module", parallel))  # without hooks
    for parameter in oracle.parameters():
        parameter.grad = None
    optimizer, error = momentum(parallel), largest_error(codec)
    rounding = max(ROUNDING, torch.finfo(next(oracle.parameters()).dtype).eps)
    worst, chain, sent = 0.0, [], []
    for step in range(steps):
        optimizer.zero_grad()
        batches = [step, 50 + step] if accumulates and step % 2 else [step]
        for one in batches:
            with parallel.no_sync() if one != batches[-1] else nullcontext():
                loss_of(parallel, place.rank, one).backward()
        expected, largest = means(
            place.size, oracle, lambda rank, of=batches: [loss_of(oracle, rank, one) for one in of]
        )
        bound = largest * (error * (2 + error) + rounding)
        found = [parameter.grad for parameter in parallel.parameters()]
        apart = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
        worst = max(worst, *(gap / bound for gap in apart))
        chain.append(bits(found))
        if hasattr(parallel, "statistics"):
            sent.append(parallel.statistics().bytes_sent)
        optimizer.step()
        oracle.load_state_dict(parallel.module.state_dict())
    return {"worst": worst, "bits": chain, "sent": sent}


def right_gradients(place: Place) -> dict[str, Any]:
    module, _ = place.build(network)
    parallel = place.parallel(module, codec="dynamic8")
    return compared(place, parallel, "dynamic8") | {"codec": parallel.statistics().codec}


def _poison(place: Place, module: nn.Module, parameter: str, value: float) -> dict[str, int]:
    """Replace a gradient value of the last rank in step POISONED; set `["step"]` each step."""
    now = {"step": 0}

    def spoil(gradient: Tensor) -> Tensor:
        if now["step"] != POISONED or place.rank != place.size - 1:
            return gradient
        spoiled = gradient.clone()
        spoiled.view(-1)[-1] = value
        return spoiled

    dict(module.named_parameters())[parameter].register_hook(spoil)
    return now


def _poisoned(parameter: str, value: float, place: Place, **options: Any) -> dict[str, Any]:
    """Train with a poisoned step and two optimizers, the first of which has `parameter`.

    Report which optimizers raised, which steps had effect, and digests of the model and of one that
    is trained without this step.
    """
    module, _ = place.build(network)
    parallel = place.parallel(module, codec="dynamic8", **options)
    now, own = _poison(place, module, parameter, value), list(module.parameters())
    optimizers = [momentum(iter(group)) for group in (own[:4], own[4:])]
    raised, changed = [], []
    for now["step"] in range(NUM_STEPS):
        parallel.zero_grad()
        loss_of(parallel, place.rank, now["step"]).backward()
        before = state(parallel, *optimizers)
        for number, optimizer in enumerate(optimizers):
            try:
                optimizer.step()
            except NonFinite:
                raised.append([now["step"], number])
        changed.append(before != state(parallel, *optimizers))
    counts = parallel.statistics()
    parallel.close()
    alike = place.parallel(place.build(network)[0], codec="dynamic8")
    steps = [number for number in range(NUM_STEPS) if number != POISONED]
    return {
        "raised": raised,
        "changed": changed,
        "bits": state(module, *optimizers),
        "without": trained(place, alike, momentum(alike), steps),
        "num_nonfinite": counts.num_nonfinite,
        "num_skipped": counts.num_skipped,
    }


def auto(place: Place) -> dict[str, Any]:
    """Train until codec `auto` has decided between the codec and plain gradients."""
    module, _ = place.build(network)
    parallel = place.parallel(module, codec="auto")
    outcome = compared(place, parallel, "dynamic8", steps=44)
    return outcome | {"codec": parallel.statistics().codec}


def _refused(place: Place, codec: str | None = None, make: Build = network) -> dict[str, Any]:
    """Train a step that must be refused; by default the last rank has another codec."""
    codec = codec or ("half" if place.rank == place.size - 1 else "dynamic8")
    parallel = place.parallel(place.build(make)[0], codec=codec)  # keep it alive during backward
    loss_of(parallel, place.rank, 0).backward()
    return {}


CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "right_gradients": right_gradients,
    "auto": auto,
    "other_codecs": _refused,
    "float64": partial(_refused, codec="dynamic8", make=lambda: network().double()),
    "nan_raises_by_default": partial(_poisoned, "0.weight", math.nan),
    "infinity_is_skipped": partial(_poisoned, "2.bias", math.inf, on_nonfinite="skip"),
}
WAITING = ("other_codecs", "float64")  # cases in which a rank can wait for a failed one
