"""Cases of training with gradients that travel encoded, with DataParallel's exchanges.

Gradients are compared with means that a process of its own computes from the samples of all ranks.
"""

import math
import sys
from typing import Any

import torch
from codec_bounds import compared, loss_of, momentum, network, state
from torch import Tensor, nn

from paceline.core.errors import NonFinite
from ranks import Place, case, main, quick

POISONED_STEP, NUM_STEPS = 2, 6


@case
def right_gradients(place: Place):
    module, _ = place.build(network)
    parallel = place.parallel(module, codec="dynamic8")
    return compared(place, parallel, "dynamic8") | {"codec": parallel.statistics().codec}


def _poison(place: Place, module: nn.Module, parameter: str, value: float) -> dict[str, int]:
    """Have one gradient value of the last rank be so in a step: "step" of what is returned."""
    now = {"step": 0}

    def spoil(gradient: Tensor) -> Tensor:
        if now["step"] != POISONED_STEP or place.rank != place.size - 1:
            return gradient
        spoiled = gradient.clone()
        spoiled.view(-1)[-1] = value
        return spoiled

    dict(module.named_parameters())[parameter].register_hook(spoil)
    return now


def _steps(
    place: Place,
    parallel: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    now: dict[str, int],
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, Any]:
    """Train, and tell of each step who raised what, and whether anything changed."""
    raised: list[list[Any]] = []
    changed = []
    for now["step"] in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(parallel, place.rank, now["step"])
        (scaler.scale(loss) if scaler else loss).backward()
        before = state(parallel, *optimizers)
        for number, optimizer in enumerate(optimizers):
            try:
                scaler.step(optimizer) if scaler else optimizer.step()
            except NonFinite as error:
                raised.append([now["step"], number, str(error)])
        if scaler:
            scaler.update()
        changed.append(before != state(parallel, *optimizers))
    finite = all(bool(parameter.isfinite().all()) for parameter in parallel.parameters())
    counts = parallel.statistics()
    return {
        "raised": raised,
        "changed": changed,
        "finite": finite,
        "bits": state(parallel, *optimizers),
        "counts": [counts.num_nonfinite, counts.num_skipped],
        "scale": scaler.get_scale() if scaler else None,
    }


def non_finite(place: Place, parameter: str, value: float, **options: Any) -> dict[str, Any]:
    """Train with a step that is poisoned, and without it: what is left must be the same."""
    (module, _), (other, _) = place.build(network), place.build(network)
    parallel = place.parallel(module, codec="dynamic8", **options)
    now = _poison(place, module, parameter, value)
    outcome = _steps(place, parallel, [momentum(parallel)], now)
    parallel.close()
    alike = place.parallel(other, codec="dynamic8")
    optimizer = momentum(alike)
    for step in [step for step in range(NUM_STEPS) if step != POISONED_STEP]:
        optimizer.zero_grad()
        loss_of(alike, place.rank, step).backward()
        optimizer.step()
    return outcome | {"without": state(alike, optimizer)}


@case
def nan_raises(place: Place):
    return non_finite(place, "0.weight", math.nan, on_nonfinite="raise")


@case
def infinity_raises_by_default(place: Place):
    return non_finite(place, "6.bias", -math.inf)


@case
def nan_is_skipped(place: Place):
    return non_finite(place, "6.weight", math.nan, on_nonfinite="skip")


@case
def infinity_is_skipped(place: Place):
    return non_finite(place, "2.bias", math.inf, on_nonfinite="skip")


def _in_parts(place: Place, parameter: str, turned: bool, scaled: bool, **options: Any):
    """Two optimizers have a part of the model each; gradients of one of them are poisoned."""
    module, _ = place.build(network)
    parallel = place.parallel(module, codec="dynamic8", **options)
    parameters = list(parallel.parameters())
    optimizers = [momentum(iter(parameters[:4])), momentum(iter(parameters[4:]))]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    now = _poison(place, module, parameter, math.inf)
    return _steps(place, parallel, optimizers[:: -1 if turned else 1], now, scaler)


@case
def two_optimizers_raise(place: Place):
    return _in_parts(place, "0.bias", False, False)


@case
def two_optimizers_raise_of_whom_the_second_has_it(place: Place):
    return _in_parts(place, "0.bias", True, False)


@case
def two_optimizers_skip(place: Place):
    return _in_parts(place, "0.bias", False, False, on_nonfinite="skip")


@case
def two_optimizers_skip_of_whom_the_second_has_it(place: Place):
    return _in_parts(place, "0.bias", True, False, on_nonfinite="skip")


@case
def two_optimizers_of_a_grad_scaler(place: Place):
    return _in_parts(place, "0.bias", False, True)


@case
def two_optimizers_of_a_grad_scaler_of_whom_the_second_has_it(place: Place):
    return _in_parts(place, "0.bias", True, True)


def _scaled(place: Place, **options: Any) -> dict[str, Any]:
    module, _ = place.build(network)
    parallel = place.parallel(module, codec="dynamic8")
    now = _poison(place, module, "2.weight", math.inf)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return _steps(place, parallel, [momentum(parallel, **options)], now, scaler)


@case
def grad_scaler(place: Place):
    return _scaled(place)


@case
def grad_scaler_of_a_fused_optimizer(place: Place):
    """Which is called though there is an infinity: it looks by itself."""
    return _scaled(place, fused=True)


@case
def auto(place: Place):
    """Long enough for the codec to be tried, and switched off where it does not win."""
    module, _ = place.build(network)
    parallel = place.parallel(module, codec="auto")
    compared(place, parallel, "dynamic8", steps=1)
    before = parallel.statistics().codec
    outcome = compared(place, parallel, "dynamic8", steps=24)
    return outcome | {"before": before, "codec": parallel.statistics().codec}


@case
def host_on_one_machine(place: Place):
    """Nothing travels between machines, and so nothing is encoded."""
    digests = []
    for codec in (None, "onebit"):
        module, _ = place.build(network)
        parallel = place.parallel(module, exchange="host", codec=codec)
        optimizer = momentum(parallel)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(parallel, place.rank, step).backward()
            optimizer.step()
        digests.append(state(module, optimizer))
        statistics = parallel.statistics()
    return {"digests": digests, "codec": statistics.codec}


@quick
def other_codecs(place: Place):
    module, _ = place.build(network)
    parallel = place.parallel(module, codec="half" if place.rank == place.size - 1 else "dynamic8")
    loss_of(parallel, place.rank, 0).backward()
    return {"codec": parallel.statistics().codec}


@quick
def float64(place: Place):
    module, _ = place.build(lambda: network().double())
    parallel = place.parallel(module, codec="dynamic8")
    loss_of(parallel, place.rank, 0).backward()
    return {"codec": parallel.statistics().codec}


if __name__ == "__main__":
    main([sys.argv[1]], sys.argv[2].split(",") if len(sys.argv) > 2 else ())
