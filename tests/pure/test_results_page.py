"""docs/results.md collects every benchmark that has figures, and names no command that is not."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()


def test_every_benchmark_with_figures_is_collected():
    measured = {file.parent.name for file in (ROOT / "benchmarks").glob("*/result.json")}
    shown = set(re.findall(r"benchmarks/(\w+)/\w+\.py", PAGE))
    assert measured - {"network"} <= shown  # what others are measured on


def test_every_command_is_there():
    for folder, program in re.findall(r"benchmarks/(\w+)/(\w+\.py)", PAGE):
        assert (ROOT / "benchmarks" / folder / program).is_file()
        assert (ROOT / "benchmarks" / folder / "result.json").is_file()
