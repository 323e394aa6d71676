"""Entry point of the command line."""

import os
import sys
from typing import NoReturn

from paceline.links.signals import handle_in_command


def main() -> NoReturn:
    """Run the command line and exit, with code 0 if the work was done."""
    handle_in_command()  # before slow imports, so that no signal is lost
    from paceline.commands.app import run

    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Do not use sys.exit, which a signal could interrupt; its cleanup is not needed.
    os._exit(code)
