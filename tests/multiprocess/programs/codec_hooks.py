"""Cases of `paceline.ddp_hook` in a program that uses DistributedDataParallel by itself."""

import math
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import codec_training  # noqa: F401 - its cases run, too
import torch
import torch.distributed as dist
from codec_bounds import compared, loss_of, momentum, network, state
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.codecs.feedback import OneBit
from paceline.core.errors import NonFinite
from paceline.exchange import codec_choice
from paceline.exchange.all_reduce import HookState
from ranks import CASES, Place, bits, case, main, quick

TINY_MB = 1e-3  # so that each of the larger parameters has a bucket of its own


class Hooked:
    """A model in DistributedDataParallel, with our hook, and the buckets it was called with."""

    def __init__(self, place: Place, codec: Any, make=network, **options: Any) -> None:
        self.module, _ = place.build(make)
        self.buckets: list[tuple[int, int]] = []
        hook_options = {"deadline_s": place.deadline_s} | {
            name: options.pop(name) for name in ("on_nonfinite", "process_group") if name in options
        }
        self.state, self._hook = paceline.ddp_hook(codec, **hook_options)
        group = hook_options.get("process_group")
        self.parallel = DistributedDataParallel(self.module, process_group=group, **options)
        self.parallel.register_comm_hook(self.state, self._noted)

    def _noted(self, state: HookState, bucket: dist.GradBucket):
        self.buckets.append((bucket.index(), len(bucket.buffer())))
        return self._hook(state, bucket)


def _right_gradients(place: Place, codec: str, view: bool, cap_mb: float | None) -> dict:
    options = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
    hooked = Hooked(place, codec, gradient_as_bucket_view=view, **options)
    outcome = compared(place, hooked.parallel, codec)
    steps: list[list[int]] = []
    for index, count in hooked.buckets:
        if index == 0:
            steps.append([])
        steps[-1].append(count)
    return outcome | {"buckets": steps, "counts": [hooked.state.num_nonfinite]}


for _codec in ("dynamic8", "linear8", "e3m0"):
    for _view in (True, False):
        for _cap in (None, TINY_MB):
            CASES[f"hook_right_{_codec}_{_view}_{_cap}"] = partial(
                _right_gradients, codec=_codec, view=_view, cap_mb=_cap
            )


@case
def hook_a_group_of_some_ranks(place: Place):
    """All but the first rank train together, and the first rank alone."""
    groups = [dist.new_group([0]), dist.new_group(list(range(1, place.size)))]
    own, rank = groups[min(place.rank, 1)], max(place.rank - 1, 0)
    members = Place(rank, dist.get_world_size(own), place.exchange, place.deadline_s)
    hooked = Hooked(members, "dynamic8", process_group=own)
    return compared(members, hooked.parallel, "dynamic8")


@case
def hook_bfloat16(place: Place):
    hooked = Hooked(place, "dynamic8", lambda: network().bfloat16())
    outcome = compared(place, hooked.parallel, "dynamic8", accumulates=False)
    dtypes = {str(parameter.grad.dtype) for parameter in hooked.module.parameters()}
    return outcome | {"dtypes": sorted(dtypes)}


@quick
def hook_float64(place: Place):
    hooked = Hooked(place, "dynamic8", lambda: network().double())
    loss_of(hooked.parallel, place.rank, 0).backward()
    return {}


def _refused(place: Place, codec: Any) -> dict:
    before = threading.active_count()
    try:
        paceline.ddp_hook(codec, deadline_s=place.deadline_s)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return {"said": said, "threads": threading.active_count() - before}
    return {"said": None}


REFUSED: dict[str, Callable[[Place], Any]] = {
    "other": lambda place: "half" if place.rank == 1 else "dynamic8",
    "auto_on_one": lambda place: "auto" if place.rank == 0 else "dynamic8",
    "unknown": lambda place: "fp8",
    "a_number": lambda place: 8,
    "nothing": lambda place: None,
    "a_class": lambda place: OneBit,
}
for _name, _codec_of in REFUSED.items():
    CASES[f"hook_refused_{_name}"] = lambda place, of=_codec_of: _refused(place, of(place))


@quick
def hook_unknown_policy(place: Place):
    return {"state": str(paceline.ddp_hook("half", on_nonfinite="ignore"))}  # type: ignore[arg-type]


def _poisoned_rank(place: Place, step: int) -> bool:
    return step == 2 and place.rank == place.size - 1


def _grad_scaler(place: Place, codec: str, init_scale: float) -> dict:
    """Train with a scale; one rank's loss is infinite in a step, and all gradients if too large."""
    hooked = Hooked(place, codec, bucket_cap_mb=TINY_MB)
    optimizer = momentum(hooked.parallel)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    scales, changed, counts = [], [], []
    for step in range(7):
        optimizer.zero_grad()
        scaled = scaler.scale(loss_of(hooked.parallel, place.rank, step))
        (scaled * (math.inf if _poisoned_rank(place, step) else 1.0)).backward()
        before = state(hooked.module, optimizer)
        scaler.step(optimizer)
        scaler.update()
        changed.append(before != state(hooked.module, optimizer))
        scales.append(scaler.get_scale())
        counts.append(hooked.state.num_nonfinite)
    finite = all(bool(parameter.isfinite().all()) for parameter in hooked.module.parameters())
    outcome = {"scales": scales, "changed": changed, "counts": counts, "finite": finite}
    return outcome | {"bits": state(hooked.module, optimizer)}


CASES["hook_grad_scaler_dynamic8"] = partial(_grad_scaler, codec="dynamic8", init_scale=1024.0)
# Beyond 65,504 half has no values.
CASES["hook_grad_scaler_half"] = partial(_grad_scaler, codec="half", init_scale=2.0**21)


@case
def hook_two_scaled_models(place: Place):
    """Two models and two optimizers: what the scaler skips for one is no error for the other."""
    one, other = (Hooked(place, "dynamic8") for _ in range(2))
    optimizers = momentum(one.module), momentum(other.module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    changed = []
    for step in range(5):
        before = [state(hooked.module) for hooked in (one, other)]
        for hooked, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.zero_grad()
            scaled = scaler.scale(loss_of(hooked.parallel, place.rank, step))
            is_bad = hooked is one and _poisoned_rank(place, step)
            (scaled * (math.inf if is_bad else 1.0)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, (one, other), strict=True)
        changed.append([was != state(hooked.module) for was, hooked in pairs])
    return {"changed": changed, "bits": state(one.module) + state(other.module)}


def _closed_over(place: Place, policy: str, optimizer_of: Callable[..., Any]) -> dict:
    """Gradients are computed in a closure, which the optimizer calls."""
    hooked = Hooked(place, "dynamic8", on_nonfinite=policy, bucket_cap_mb=TINY_MB)
    optimizer = optimizer_of(hooked.module.parameters())
    changed, raised = [], []
    for step in range(5):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(hooked.parallel, place.rank, step)
            (loss * (math.nan if _poisoned_rank(place, step) else 1.0)).backward()
            return loss

        before = state(hooked.module)
        try:
            loss = optimizer.step(closure)
            assert loss is not None
        except NonFinite:
            raised.append(step)
        changed.append(before != state(hooked.module))
    skipped = hooked.state.num_skipped
    return {"changed": changed, "raised": raised, "skipped": skipped, "bits": bits(hooked.module)}


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


for _policy in ("raise", "skip"):
    CASES[f"hook_closure_{_policy}"] = partial(_closed_over, policy=_policy, optimizer_of=_sgd)


@case
def hook_feedback_after_a_skipped_step(place: Place):
    """What a skipped step has lost is not made up for: its gradients may be of any size."""
    hooked = Hooked(place, "onebit", on_nonfinite="skip")
    optimizer, largest = momentum(hooked.module), []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(hooked.parallel, place.rank, step)
        if _poisoned_rank(place, step):
            loss = loss + hooked.module[0].weight[0, 0] * math.inf
        (loss * (1e20 if step == 2 else 1.0)).backward()
        optimizer.step()
        largest.append(max(float(p.detach().abs().max()) for p in hooked.module.parameters()))
    return {"largest": largest, "skipped": hooked.state.num_skipped}


def linear() -> nn.Module:
    return nn.Linear(20, 40, bias=False)


@case
def hook_buckets_made_anew(place: Place):
    """The second step has the parameters in another order, and gradients that are all zero."""
    hooked = Hooked(place, "onebit")
    loss_of(hooked.parallel, place.rank, 0).backward()
    owed = max(float(error.abs().max()) for error in hooked.state.state_dict().values())
    hooked.parallel.zero_grad()
    (loss_of(hooked.parallel, place.rank, 0) * 0).backward()
    largest = max(float(parameter.grad.abs().max()) for parameter in hooked.module.parameters())
    return {"largest": largest, "owed": owed, "lengths": [count for _, count in hooked.buckets]}


@case
def hook_checkpoint(place: Place):
    """Go on from parameters, momentum and errors; a single bucket is the same from the start."""
    one = Hooked(place, "onebit", linear)
    optimizer = momentum(one.module)

    def train(hooked: Hooked, optimizer: torch.optim.Optimizer, steps: range) -> str:
        for step in steps:
            optimizer.zero_grad()
            loss_of(hooked.parallel, place.rank, step).backward()
            optimizer.step()
        return state(hooked.module)

    train(one, optimizer, range(4))
    saved = [one.module.state_dict(), optimizer.state_dict(), one.state.state_dict()]
    saved = [_cloned(part) for part in saved]
    chains = [train(one, optimizer, range(4, 8))]
    for errors in (saved[2], {}):
        other = Hooked(place, "onebit", linear)
        again = momentum(other.module)
        other.module.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        other.state.load_state_dict(errors)
        chains.append(train(other, again, range(4, 8)))
    return {"chains": chains}


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(one) for key, one in value.items()}
    return [_cloned(one) for one in value] if isinstance(value, list) else value


@case
def hook_the_codec_that_pays(place: Place):
    """Through the steps in which both ways are tried, whatever wins."""
    codec_choice.AutoCodec._pays = lambda self, count: True  # type: ignore[method-assign]
    hooked = Hooked(place, "auto")
    worst, sent, verdicts = 0.0, [hooked.state.bytes_sent], []
    for _ in range(24):
        worst = max(worst, compared(place, hooked.parallel, "dynamic8", steps=1)["worst"])
        sent.append(hooked.state.bytes_sent)
        verdicts.append(hooked.state.why.split(",")[0])
    return {"worst": worst, "sent": sent, "verdicts": verdicts, "why": hooked.state.why}


if __name__ == "__main__":
    main(["allreduce"], sys.argv[1].split(",") if len(sys.argv) > 1 else ())
