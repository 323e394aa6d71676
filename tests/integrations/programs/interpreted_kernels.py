"""Triton's kernels against the specification, run by Triton's interpreter on the CPU.

Run by test_triton_kernels.py in a process of its own: Triton reads the variable when it is
imported, and from then on all kernels of a process are interpreted.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from kernel_contract import KernelContract
from paceline.codecs.quantization import TABLES, table
from paceline.codecs.triton_kernels import cells_of

# What overflows is infinite, as it is meant to be; numpy, which interprets, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


class TestInterpreted(KernelContract):
    on = "cpu"


@pytest.mark.parametrize("name", TABLES)
def test_cells_hold_every_threshold(name: str):
    first, cells = cells_of(table(name))
    thresholds = table(name).thresholds
    above = thresholds.nextafter(torch.tensor(2.0))
    for values, more in ((thresholds, 0), (above, 1)):
        bits = values.view(torch.int32)
        found = (cells[(bits >> 16) - first] + (bits & 0xFFFF)) >> 16
        assert torch.equal(found, torch.arange(len(values), dtype=torch.int32) + more)
