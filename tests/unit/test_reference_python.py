"""The Python reference has every public name, with an example that runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from processes import forking

PAGE = (Path(__file__).parents[2] / "docs" / "reference-python.md").read_text()
EXAMPLES = {
    name: re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    for name, section in re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
}
ON_TWO_RANKS = {"DataParallel", "ddp_hook", "LocalUpdates", "NonFinite"}  # started by torchrun


def run(code: str) -> None:
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


def test_every_public_name_has_its_docstring_and_an_example():
    names = set(paceline.__all__) - {"__version__"}
    assert set(re.findall(r"^::: paceline\.(\w+)$", PAGE, re.M)) == names
    assert {name: len(examples) for name, examples in EXAMPLES.items()} == dict.fromkeys(names, 1)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_example_runs(name, request, monkeypatch, tmp_path):
    (code,) = EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    if name in ON_TWO_RANKS:
        request.getfixturevalue("pair")(run, code, group=False)
        return
    if "train(recipe" in code:  # it forks workers, so no backward pass may come before
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
        return
    with forking():
        run(code)
