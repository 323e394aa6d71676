"""What ranks tell each other, and what torch's DistributedDataParallel does between them."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.links.rendezvous import process_group
from paceline.models import describe, find
from paceline.record.merge import clock_offset, measure_offset
from paceline.strategies.allreduce.plan import buckets
from pair import Ranks

AHEAD_S = 5.0


def bucket_sizes(name: str, bucket_mb: int | None) -> list[int]:
    """Return the sizes of the buckets that DistributedDataParallel really reduces."""
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
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [("resnet18", None), ("resnet110", 1), ("googlenet", None)]
        ),
    ],
)
def test_planned_buckets_are_those_of_torch(pair: Ranks, model: str, bucket_mb: int | None) -> None:
    architecture = find(model)
    workload = describe(architecture.build(None), torch.zeros(2, *architecture.input_shape))
    planned = [bucket.nbytes for bucket in buckets(workload.in_backward_order, bucket_mb)]
    assert pair(bucket_sizes, model, bucket_mb) == [planned, planned]


def offsets() -> tuple[float, float, float, list[str]]:
    """Return what this rank finds of its clock; that of rank 1 runs ahead."""
    with process_group(60.0) as group:
        ahead_s = AHEAD_S if group.rank == 1 else 0.0
        shared = clock_offset(group)
        measured = measure_offset(group, 1, lambda: time.monotonic() + ahead_s)
        rows = group.gather({"text": "é" * (group.rank * 1000)})
        return shared.ahead_s, measured.ahead_s, measured.error_s, [row["text"] for row in rows]


def test_clock_offsets_are_measured_and_values_gathered(pair: Ranks) -> None:
    _, (shared_s, ahead_s, error_s, texts) = pair(offsets, group=False)
    assert shared_s == 0  # one kernel, one monotonic clock
    assert error_s > 0
    assert abs(ahead_s - AHEAD_S) <= error_s
    assert texts == ["", "é" * 1000]
