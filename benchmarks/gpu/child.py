"""The process of one part: imports its module, runs it, and keeps what it finds.

    child.py MODULE FILE FOLDER [--smoke]

It runs in FOLDER, which is empty. Exit code 0 if the part was done. It leads a session of its own.
SIGTERM ends it, and has it say where it was.
"""

import faulthandler
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from paceline.links.processes import PARENT  # noqa: E402
from paceline.native import die_with_parent  # noqa: E402


def main() -> int:
    """Run a part."""
    os.setsid()
    faulthandler.register(signal.SIGTERM, chain=True)
    die_with_parent(int(os.environ[PARENT]))
    from part import Part

    module, file, folder, *options = sys.argv[1:]
    os.chdir(folder)
    part = Part(Path(file), smoke="--smoke" in options)
    try:
        import_module(module).run(part)
    except Exception as error:
        part.end(error)
        raise
    part.end(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
