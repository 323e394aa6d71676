"""The loop of the README, as it stands there, under the command that stands below it."""

import re
import shlex
from pathlib import Path

import pytest

from launched import succeeded
from paceline.strategies import EXCHANGES

pytestmark = pytest.mark.slow

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_loop_runs_and_says_which_exchange_it_has_chosen(start, tmp_path):
    ((name, program),) = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", README, re.S)
    (tmp_path / name).write_text(program)
    (asked,) = re.findall(r"Start it with `torchrun (.+?)`", README)
    arguments = shlex.split(asked)
    assert arguments[-1] == name
    # Standalone: at a free port, as tests beside this one may have torchrun's usual one.
    command = ("-m", "torch.distributed.run", "--standalone", *arguments)
    done = succeeded(lambda: start(*command).finish())
    # Both print to one pipe, where a text and its line end may have another's between them.
    said = rf"({'|'.join(EXCHANGES)}): the fastest of those measured, by the step: "
    chosen = re.findall(said, done.out)
    assert len(chosen) == int(arguments[arguments.index("--nproc-per-node") + 1])
    assert len(set(chosen)) == 1
