"""LocalUpdates with scalers, schedules, adapters and sharding, compared with naive averaging."""

import copy
import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._common_utils import TrainingState
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import paceline
from rounds import Loop, adamw, averaged, inner_step, loss_of, net, vector

NUM_STEPS, SYNC_EVERY = 9, 4


def wrapped(model: nn.Module, wrap: bool) -> nn.Module:
    return DistributedDataParallel(model) if wrap else model


def stepping(
    model: nn.Module,
    worker: int,
    take: Callable[[Optimizer], Any] = lambda optimizer: optimizer.step,
) -> Loop:
    """Return a plain training loop whose optimizer step is the function that `take` returns."""
    optimizer = adamw(model)
    own = take(optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, worker, number).backward()
        own()

    return model, [optimizer], step


def plain(worker: int, wrap: bool) -> Loop:
    return stepping(wrapped(net(), wrap), worker)


def scheduled(worker: int, wrap: bool) -> Loop:
    def take(optimizer: Optimizer) -> Callable[[], None]:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return lambda: (optimizer.step(), schedule.step())

    return stepping(wrapped(net(), wrap), worker, take)


def compiled(worker: int, wrap: bool) -> Loop:
    model = wrapped(net(), wrap)  # the oracle computes eagerly
    return stepping(torch.compile(model, backend="eager") if wrap else model, worker)


def compiled_steps(worker: int, wrap: bool) -> Loop:
    def take(optimizer: Optimizer) -> Callable[[], None]:
        if not wrap:
            return optimizer.step
        return torch.compile(lambda: optimizer.step(), backend="eager")

    return stepping(wrapped(net(), wrap), worker, take)


def with_adapters(worker: int, wrap: bool) -> Loop:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0)
    torch.manual_seed(0)
    return stepping(wrapped(get_peft_model(net(), config), wrap), worker)


def scaled(worker: int, wrap: bool, fused: bool = False) -> Loop:
    """Skip step 5 of worker 1, with infinite gradients; fused optimizers skip it themselves."""
    model = wrapped(net(), wrap)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu")

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, worker, number)
        scaler.scale(loss * (math.inf if (worker, number) == (1, 5) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, [optimizer], step


LOOPS = {
    "plain": plain,
    "scaled": scaled,
    "scaled_fused": partial(scaled, fused=True),
    "scheduled": scheduled,
    "compiled": compiled,
    "compiled_steps": compiled_steps,
    "with_adapters": with_adapters,
}
SLOW = ("compiled_steps",)


def naive(make: Callable[[int], Loop]) -> Tensor:
    return averaged([make(worker) for worker in (0, 1)], [NUM_STEPS] * 2, [SYNC_EVERY] * 2)


def trained(name: str, wrap: bool) -> tuple[Tensor, int]:
    model, optimizers, step = LOOPS[name](dist.get_rank(), wrap)
    with paceline.LocalUpdates(model, optimizers, SYNC_EVERY, outer="average") as updates:
        for number in range(NUM_STEPS):
            step(number)
    return vector(model), updates.num_steps


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in LOOPS]
)
def test_a_loop_within_ddp_trains_as_naive_averaging_does(pair: Any, name: str) -> None:
    if name == "with_adapters" and find_spec("peft") is None:
        pytest.skip("without peft")
    (first, num_steps), (second, others_steps) = pair(trained, name, True)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, naive(lambda worker: LOOPS[name](worker, False)))
    assert (num_steps, others_steps) == (NUM_STEPS, NUM_STEPS - ("scaled" in name))


def bytes_of_adapters() -> tuple[int, int, bool]:
    model, optimizers, step = with_adapters(dist.get_rank(), wrap=False)
    frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
    before = copy.deepcopy(frozen)
    with paceline.LocalUpdates(model, optimizers, NUM_STEPS) as updates:
        for number in range(NUM_STEPS):
            step(number)
    same = all(torch.equal(one, before[name]) for name, one in frozen.items())
    return updates.statistics().bytes_sent, 4 * len(vector(model)), same


@pytest.mark.skipif(find_spec("peft") is None, reason="without peft")
def test_adapters_alone_travel_and_the_base_keeps_its_bits(pair: Any) -> None:
    for sent, of_adapters, same in pair(bytes_of_adapters):
        assert sent == of_adapters
        assert same


def with_buffers(num_steps: list[int]) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    optimizer = adamw(model)
    with paceline.LocalUpdates(model, optimizer, [4, 1][rank]):
        for number in range(num_steps[rank]):
            inner_step(model, optimizer, rank, number)
    return vector(model), torch.cat([one.reshape(-1).float() for one in model.buffers()])


@pytest.mark.parametrize("num_steps", [[8, 2], [8, 0]])
def test_steps_within_ddp_do_not_wait_for_a_worker_with_fewer_steps(
    pair: Any, num_steps: list[int]
) -> None:
    first, second = pair(with_buffers, num_steps)
    assert all(map(torch.equal, first, second))


def ddp(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(net(), process_group=mesh["local"].get_group())


def data_parallel(mesh: DeviceMesh) -> nn.Module:
    return paceline.DataParallel(net(), process_group=mesh["local"].get_group(), exchange="host")


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["local"])
    return fully_shard(model, mesh=mesh["local"])


INNER = {"ddp": ddp, "data_parallel": data_parallel, "sharded": sharded}


def trained_on_hosts(inner: str, codec: str | None) -> Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    model = INNER[inner](mesh)
    optimizer = adamw(model)
    options = {"outer": "average", "codec": codec, "device_mesh": mesh["host"]}
    with paceline.LocalUpdates(model, optimizer, SYNC_EVERY, **options):
        for number in range(NUM_STEPS):
            inner_step(model, optimizer, dist.get_rank(), number)
    return vector(model)


def whole_host(host: int) -> Loop:
    """Train a host's model in one process, on the samples of both ranks."""
    model = net()
    optimizer = adamw(model)

    def step(number: int) -> None:
        optimizer.zero_grad()
        losses = [loss_of(model, 2 * host + local, number) for local in (0, 1)]
        torch.stack(losses).mean().backward()
        optimizer.step()

    return model, [optimizer], step


@pytest.mark.parametrize("inner", INNER)
def test_hosts_train_as_one_process_each(four_ranks: Any, inner: str) -> None:
    found = four_ranks(trained_on_hosts, inner, None)
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], naive(whole_host))


def test_shards_are_encoded_by_themselves(four_ranks: Any) -> None:
    found = four_ranks(trained_on_hosts, "sharded", "dynamic8")
    assert all(torch.equal(one, found[0]) for one in found)
    exact = naive(whole_host)
    assert 0 < float((found[0] - exact).norm() / (exact - vector(net())).norm()) < 0.05


class OfGpus(FullyShardedDataParallel):
    """An FSDP module with a process group but without shards, which need GPUs."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module, self.process_group = module, dist.group.WORLD
        self.training_state = TrainingState.IDLE


def static_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def between_workers(kind: str) -> None:
    kinds = {"fsdp2": fully_shard, "fsdp1": OfGpus, "static": static_ddp}
    model = kinds[kind](net())
    paceline.LocalUpdates(model, adamw(model))


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "static"])
def test_shards_and_static_graphs_between_workers_are_refused(pair: Any, kind: str) -> None:
    failures = pair(between_workers, kind, errors=True)
    assert [one.fields["field"] for one in failures] == ["model"] * 2
