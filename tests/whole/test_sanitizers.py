"""Run the native sums, codecs and arena with the compiler's sanitizers."""

import sys
from pathlib import Path

import nanobind
import pytest

from packages import ROOT, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_native_code_runs_without_a_fault(sanitizer: str, tmp_path: Path) -> None:
    found = f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"
    run("cmake", "-S", ROOT, "-B", tmp_path, *found, f"-DPACELINE_SANITIZE={sanitizer}", cwd=ROOT)
    run("cmake", "--build", tmp_path, "--target", "sanitized", "--parallel", "2", cwd=ROOT)
    assert run(tmp_path / "sanitized", cwd=tmp_path) == "done\n"
