"""Compare Triton kernels with their specification in Triton's interpreter, on the CPU.

test_triton_kernels.py runs this file in a separate process, because Triton reads TRITON_INTERPRET
at import and then interprets all kernels of the process.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from kernel_contract import KernelContract
from paceline.codecs.quantization import TABLES, table
from paceline.codecs.triton_kernels import cells_of

# Overflows to infinity are intended, but numpy, which the interpreter uses, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


class TestInterpreted(KernelContract):
    block_sizes, most = (4096,), 9001  # the interpreter is slow


@pytest.mark.parametrize("name", TABLES)
def test_cells_hold_every_threshold(name: str):
    first, cells = cells_of(table(name))
    thresholds = table(name).thresholds
    above = thresholds.nextafter(torch.tensor(2.0))
    for values, more in ((thresholds, 0), (above, 1)):
        bits = values.view(torch.int32)
        found = (cells[(bits >> 16) - first] + (bits & 0xFFFF)) >> 16
        assert torch.equal(found, torch.arange(len(values), dtype=torch.int32) + more)
