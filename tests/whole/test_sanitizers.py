"""Run the native sums, codecs and arena with the compiler's sanitizers."""

import subprocess
import sys
from pathlib import Path

import nanobind
import pytest

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_native_code_runs_without_a_fault(sanitizer: str, tmp_path: Path) -> None:
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
    options += [f"-DPACELINE_SANITIZE={sanitizer}"]
    subprocess.run(["cmake", "-S", SOURCE, "-B", tmp_path, *options], check=True)
    build = ["cmake", "--build", tmp_path, "--target", "sanitized", "--parallel", "2"]
    subprocess.run(build, check=True)
    assert subprocess.check_output([tmp_path / "sanitized"]) == b"done\n"
