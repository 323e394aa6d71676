"""Cases of Accelerate, whose loops train with Paceline and with DDP."""

import os
from functools import partial
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType
from safetensors import safe_open
from tool_cases import (
    MOVED,
    ROUNDING,
    Net,
    batches,
    check_exchange,
    distance,
    exchange_of,
    sgd,
    wraps,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.integrations.accelerate import with_paceline
from refusals import refused as refuses


def accelerator_of(**options: Any) -> Accelerator:
    AcceleratorState._reset_state()  # it keeps the precision
    handlers = [DistributedDataParallelKwargs(**options.pop("ddp", {}))]
    return Accelerator(cpu=True, kwargs_handlers=handlers, **options)


def trained(accelerator: Accelerator, model: nn.Module, odd: bool = False) -> list[float]:
    """Train a prepared model; return its gradient norms before clipping."""
    optimizer, loader = accelerator.prepare(sgd(model), batches())
    norms = []
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader, 1):
            with accelerator.accumulate(model):
                way = odd and number % 2 == 1
                accelerator.backward((model(inputs, way) - targets).square().mean())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
    return norms


def beside_ddp(num_exchanges: int, odd: bool = False, **options: Any) -> None:
    models, norms = [], []
    for own in ({"exchange": "host"}, None):
        accelerator = accelerator_of(**dict(options))
        if own:
            accelerator = with_paceline(accelerator, **own)
        model = accelerator.prepare(Net())
        norms.append(trained(accelerator, model, odd))
        models.append((accelerator.unwrap_model(model), model))
    (ours, wrapped), (theirs, _) = models
    assert distance(ours, theirs) <= ROUNDING
    assert max(abs(one - other) for one, other in zip(*norms, strict=True)) <= ROUNDING
    check_exchange(exchange_of(wrapped), num_exchanges)


def for_gpus_where_there_are_none() -> None:
    """Without GPUs, this accelerator would silently train each rank alone."""
    with refuses("accelerator"):
        with_paceline(Accelerator())


accumulated = partial(beside_ddp, 4, gradient_accumulation_steps=2)
with_a_layer_left_out = partial(beside_ddp, 8, odd=True, ddp={"find_unused_parameters": True})
in_bfloat16 = partial(beside_ddp, 8, mixed_precision="bf16")


def compiled() -> None:
    """Compare a model compiled by Accelerate with one that is not compiled."""
    nets, models = [Net(), Net()], []
    for net, options in zip(nets, ({"dynamo_backend": "aot_eager"}, {}), strict=True):
        accelerator = with_paceline(accelerator_of(**options), exchange="host")
        models.append(accelerator.prepare(net))
        trained(accelerator, models[-1])
    assert distance(*nets) <= ROUNDING
    assert wraps(models[0]) == ["DataParallel"]
    assert [type(model.module).__name__ for model in models] == ["OptimizedModule", "Net"]


def without_sync_by_hand() -> None:
    """Gradients are local in `no_sync`, until the next backward pass exchanges them."""
    accelerator = with_paceline(accelerator_of(), exchange="host")
    model = accelerator.prepare(Net())
    rank = accelerator.process_index
    inputs = [torch.full((2, 6), 1.0 + rank + number).cumsum(0) for number in range(2)]
    with accelerator.no_sync(model):
        first, second = model(inputs[0]).sum(), model(inputs[1]).sum()
        accelerator.backward(first)
    own = model.module.last.weight.grad.clone()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    both = model.module.last.weight.grad
    gathered = accelerator.gather(own), accelerator.gather(both.clone())
    assert not torch.equal(*gathered[0])
    assert torch.equal(*gathered[1])


def wrapped_once() -> None:
    """Each model is wrapped once, also for save_state, and only if it will be trained."""
    accelerator = with_paceline(accelerator_of())
    net, given = Net(), paceline.DataParallel(Net(), exchange="tree")
    first = accelerator.prepare(net)
    again = accelerator.prepare(first)
    net_again, kept = accelerator.prepare(net), accelerator.prepare(given)
    direct = accelerator.prepare_model(accelerator.prepare_model(Net()))
    frozen = accelerator.prepare(Net().requires_grad_(False))
    evaluated = accelerator.prepare_model(evaluating := Net(), evaluation_mode=True)
    for one in (first, again, net_again, kept, direct):
        assert wraps(one) == ["DataParallel"]
    assert all((first is again, first is net_again, kept is given, evaluated is evaluating))
    assert len(accelerator._models) == 5
    assert wraps(frozen) == wraps(evaluated) == []
    assert wraps(accelerator.prepare(evaluating)) == ["DataParallel"]
    # An accelerator without Paceline.
    assert wraps(accelerator_of().prepare(direct.module)) == ["DistributedDataParallel"]


def hook_of_its_own() -> None:
    """DistributedDataParallelKwargs sets a hook that rounds to float16."""
    models = []
    for hook in (DDPCommunicationHookType.FP16, DDPCommunicationHookType.NO):
        accelerator = with_paceline(accelerator_of(ddp={"comm_hook": hook}), exchange="allreduce")
        models.append(accelerator.prepare(Net()))
        trained(accelerator, models[-1])
    assert 1e-7 <= distance(*models) <= 1e-2


def saved_and_loaded() -> None:
    accelerator = with_paceline(accelerator_of())
    model = accelerator.prepare(Net())
    trained(accelerator, model)
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    with safe_open("state/model.safetensors", "pt") as saved:
        prefixes = {name.partition(".")[0] for name in saved.keys()}  # noqa: SIM118  no mapping
    kept = Net()
    kept.load_state_dict(accelerator.unwrap_model(model).state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    moved = distance(model.module, kept)
    accelerator.load_state("state")
    assert prefixes == {"module"}  # as with DDP
    if accelerator.is_main_process:  # it alone saves, with its buffers
        assert moved >= MOVED
        assert distance(model.module, kept) <= ROUNDING


def refused() -> None:
    fp16 = {"comm_hook": DDPCommunicationHookType.FP16}
    unused = accelerator_of(ddp={"find_unused_parameters": True})
    ddp = DistributedDataParallel(Net())
    accelerator = with_paceline(accelerator_of(), exchange="host")
    with refuses("comm_hook"):
        with_paceline(accelerator_of(ddp=fp16), exchange="host")
    with refuses("find_unused_parameters"):
        with_paceline(unused, find_unused_parameters=False)
    with refuses("model"):
        accelerator.prepare(ddp)
    with refuses("register_comm_hook"):
        accelerator.prepare(Net()).register_comm_hook(None, lambda *_: None)
    with refuses("accelerator"):
        with_paceline(accelerator_of(fsdp_plugin=FullyShardedDataParallelPlugin()))
    del os.environ["ACCELERATE_USE_FSDP"]  # Accelerate has set it
    for field, name, value in (
        ("accelerator", "parallelism_config", ParallelismConfig()),
        ("mixed_precision", "_mixed_precision", "fp8"),
    ):
        accelerator = accelerator_of()
        setattr(accelerator.state, name, value)
        with refuses(field):
            with_paceline(accelerator)
