"""Run the Triton kernels that benchmarks/gpu times, in Triton's interpreter."""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
BENCHMARKS = Path(__file__).parents[2]
sys.path[:0] = [str(BENCHMARKS / "gpu"), str(BENCHMARKS)]

import torch  # noqa: E402
from evidence.codecs import kernels  # noqa: E402

found = kernels(torch.randn(5000))
for variant in found.values():
    variant.run()
print(json.dumps({name: variant.nbytes for name, variant in found.items()}))
