"""DDP's buckets, memory use and clock offsets on ranks, compared with plans."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from boxes import box, chain, link
from paceline.core.workload import replica_nbytes
from paceline.exchange.synchronized import Synchronized
from paceline.links.rendezvous import process_group
from paceline.planner.forecast import memory
from paceline.record.merge import clock_offset, measure_offset
from paceline.strategies import STRATEGIES
from paceline.strategies.allreduce.plan import buckets
from paceline.studies.profile.memory_use import make_momentum, track
from paceline.training.models import describe, find
from pair import Ranks

AHEAD_S = 5.0
NBYTES = 4000  # of gradients
SIZE = 1000  # width of two layers: activations of one sample are negligible


def bucket_sizes(name: str, bucket_mb: int | None) -> list[int]:
    """Return the sizes of DistributedDataParallel's buckets."""
    parallel = DistributedDataParallel(find(name).build(None), bucket_cap_mb=bucket_mb)
    sizes: list[int] = []

    def note(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, note)
    inputs = torch.zeros(2, *find(name).input_shape)
    for _ in range(3):
        sizes.clear()
        parallel(inputs).sum().backward()
    return sizes


@pytest.mark.parametrize(
    ("model", "bucket_mb"),
    [
        ("lenet5", None),
        ("resnet18", 5),
        pytest.param("resnet18", None, marks=pytest.mark.slow),
    ],
)
def test_planned_buckets_match_ddp(pair: Ranks, model: str, bucket_mb: int | None) -> None:
    architecture = find(model)
    workload = describe(architecture.build(None), torch.zeros(2, *architecture.input_shape))
    planned = [bucket.nbytes for bucket in buckets(workload.in_backward_order, bucket_mb)]
    assert pair(bucket_sizes, model, bucket_mb) == [planned, planned]


def buffers(name: str, kind: str, workers: int) -> list[float]:
    """Return each device's planned buffers, relative to the size of the gradients."""
    devices = [f"{kind}{i}" for i in range(workers)]
    links = [link(one, "h", 1e9) for one in devices]
    machine, work = box(*[kind] * workers, links=links), chain((1.0, NBYTES))
    strategy = STRATEGIES[name]
    needed = memory(work, machine, strategy, strategy.config(workers=workers))
    return [(needed[device] - replica_nbytes(work)) / NBYTES for device in devices]


def counted(name: str) -> float:
    """Measure the peak buffers of two steps, relative to the size of the gradients."""
    with process_group(60.0) as group:
        model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        make_momentum(model, optimizer)
        strategy, inputs = STRATEGIES[name], torch.zeros(1, SIZE)
        method = strategy.runner().method(strategy.config(workers=group.world_size))

        def steps() -> None:
            # On CPUs, `host` could use views of shared memory as gradients; on a GPU it cannot.
            views = {"gradient_as_bucket_view": method.name == "tree", "init_sync": False}
            replica = Synchronized(model, method, group=group, **views)
            for _ in range(2):
                replica(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            replica.close()

        peak = track(steps, model, optimizer, inputs).peak_nbytes
        # Subtract parameters, momentum and gradients.
        return peak / sum(one.nbytes for one in model.parameters()) - 3


@pytest.mark.parametrize("name", ["host", "tree"])
def test_devices_use_the_planned_memory(pair: Ranks, name: str):
    found = pair(counted, name, group=False)
    assert found == pytest.approx(buffers(name, "cpu", 2), abs=0.05)


def test_plans_have_the_buffers_of_a_gpu_and_of_parents():
    # `host` gathers a GPU's gradients in one buffer; `tree` has one buffer, parents have two.
    assert buffers("host", "cpu", 4) == [0, 0, 0, 0]
    assert buffers("host", "gpu", 4) == [1, 1, 1, 1]
    assert buffers("tree", "cpu", 4) == buffers("tree", "gpu", 4) == [2, 1, 2, 1]
    assert buffers("host", "gpu", 1) == buffers("tree", "gpu", 1) == [0]


def offsets() -> tuple[float, float, float, list[list[str]]]:
    """Measure the offset of rank 1's clock, which is ahead; gather texts."""
    with process_group(60.0) as group:
        ahead_s = AHEAD_S if group.rank == 1 else 0.0
        shared = clock_offset(group)
        measured = measure_offset(group, 1, lambda: time.monotonic() + ahead_s)
        texts = [
            group.gather("é" * length * (1 + group.rank)) for length in (0, 20, 21, 42, 43, 1000)
        ]
        return shared.ahead_s, measured.ahead_s, measured.error_s, texts


def test_clock_offsets_are_measured_and_values_gathered(pair: Ranks) -> None:
    _, (shared_s, ahead_s, error_s, texts) = pair(offsets, group=False)
    assert shared_s == 0  # one kernel, one monotonic clock
    assert error_s > 0
    assert abs(ahead_s - AHEAD_S) <= error_s
    # JSON has 6 bytes for "é", and gather sends 256 bytes in its first exchange
    assert texts == [["é" * length, "é" * 2 * length] for length in (0, 20, 21, 42, 43, 1000)]
