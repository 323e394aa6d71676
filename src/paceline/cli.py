"""The command line: paceline train | rehearse | plan | profile | scale | compare and others."""

import os
import sys
from typing import NoReturn

from paceline.links.signals import handle_in_command


def main() -> NoReturn:
    """Run the command line, and end the process: exit code 0 if the work was done."""
    handle_in_command()  # before all that takes time: no signal is lost
    from paceline.commands.app import run

    code = run()
    # Not by sys.exit, whose work a signal could interrupt: all is closed by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
