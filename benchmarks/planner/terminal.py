"""Draw a terminal with a command and its output, for README.md."""

import re
import subprocess
import sys
from io import StringIO

from rich.console import Console

_COMMAND = (
    "paceline plan resnet50 --machine two-laptops-gigabit --batch-size 32 "
    "--strategy allreduce,host,tree"
)
_WIDTH = 92  # characters
_FONTS = re.compile(r"@font-face \{.*?\}\n?", re.DOTALL)  # fonts from another website


def drawn(command: str = _COMMAND) -> str:
    """Run a command, and return an SVG of a terminal with its output."""
    found = subprocess.run(
        [sys.executable, "-m", *command.split()], capture_output=True, text=True, check=True
    )
    console = Console(
        record=True, file=StringIO(), width=_WIDTH, markup=False, highlight=False, emoji=False
    )
    console.print(f"$ {command}")
    console.print(re.sub(" +$", "", found.stdout, flags=re.MULTILINE))
    return _FONTS.sub("", console.export_svg(title="predicted, nothing has run"))
