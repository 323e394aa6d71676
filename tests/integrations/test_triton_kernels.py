"""The kernels for CUDA, on any machine: by the interpreter that Triton has for it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "interpreted_kernels.py"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_equal_the_specification_in_the_interpreter(start, monkeypatch):
    """Every bit of codes, scales, values and sums; interpreted, a division is exact as well."""
    # Afresh, since Triton reads once whether it is to interpret: when it is imported.
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-q", str(PROGRAM), "--timeout", "300")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # whatever imports Triton first
    done = start(*command, afresh=True).finish()
    assert done.code == 0, done.out + done.err
