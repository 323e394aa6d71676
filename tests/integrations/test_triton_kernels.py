"""Triton kernels in Triton's interpreter, which needs no GPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "interpreted_kernels.py"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_equal_the_specification_in_the_interpreter(start, monkeypatch):
    """Compare all bits of codes, scales, values and sums."""
    # In a new process, because Triton reads the variable only at import.
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-q", str(PROGRAM), "--timeout", "300")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # another import of Triton may come first
    done = start(*command, afresh=True).finish()
    assert done.code == 0, done.out + done.err
