"""What ranks tell each other, and what torch's DistributedDataParallel does between them."""

import json

import pytest
import torch

from launched import LAUNCH, PROGRAMS
from paceline.models import describe, find
from paceline.strategies.allreduce.plan import buckets


def run(start, program: str, *arguments: str):
    done = start("-c", LAUNCH, "2", str(PROGRAMS / program), *arguments).finish()
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize(
    ("model", "bucket_mb"),
    [("lenet5", None), ("resnet18", None), ("resnet18", 5), ("resnet110", 1), ("googlenet", None)],
)
def test_planned_buckets_are_those_of_torch(start, model: str, bucket_mb: int | None):
    real = run(start, "buckets.py", model, json.dumps(bucket_mb))
    architecture = find(model)
    workload = describe(architecture.build(None), torch.zeros(2, *architecture.input_shape))
    planned = buckets(workload.in_backward_order, bucket_mb)
    assert [bucket.nbytes for bucket in planned] == real


def test_clock_offsets_are_measured_and_values_gathered(start):
    shared, ahead, error, rows = run(start, "clocks.py")
    assert shared == 0  # one kernel, one monotonic clock
    assert 0 < error < 0.5
    assert abs(ahead - 5) <= error
    assert rows == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é" * 1000}]
