"""The host exchange between ranks on GPUs; several of them may share one."""

import json
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "programs" / "shared_gpu.py"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-4)])
@pytest.mark.parametrize("clip", ["clip", "as it is"])
def test_ranks_on_gpus_train_as_one_process_does(start, num_ranks, dtype, tolerance, clip):
    ranks = ["--standalone", f"--nproc-per-node={num_ranks}"]
    done = start("-m", "torch.distributed.run", *ranks, str(PROGRAM), dtype, clip).finish()
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert sorted(row["rank"] for row in rows) == list(range(num_ranks))
    assert max(row["error"] for row in rows) < tolerance
    assert len({tuple(row["bits"]) for row in rows}) == 1
    names = {name.partition("[")[0] for row in rows for name in row["spans"]}
    assert {"d2h", "reduce", "h2d"} <= names
