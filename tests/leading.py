"""Run a Python command in a folder, in a new session and with its own fork server.

    python leading.py FOLDER python -m MODULE ...

In a forked process, the new fork server inherits the imports of this process.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from paceline.links import forkserver


def handle_as_python() -> None:
    """Handle signals as a new Python program does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def run(command: Sequence[str]) -> None:
    """Run a Python command line: `-m MODULE ...`, `-c CODE ...` or a file."""
    handle_as_python()
    what, *arguments = command[1:]
    if what == "-m":
        sys.path[0] = str(Path.cwd())
        forkserver.run_module(arguments)
    elif what == "-c":
        sys.argv = [what, *arguments[1:]]
        sys.path[0] = ""
        main_module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), main_module.__dict__)
    else:
        forkserver.run_module(command[1:])


def main() -> None:
    folder, *command = sys.argv[1:]
    os.chdir(folder)
    os.setsid()
    leader = os.getpid()
    os.environ[forkserver.ADDRESS], listener = forkserver.listen()
    if os.fork() == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        forkserver.die_with_parent(leader)
        nobody = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):  # otherwise the server would keep the pipes open
            os.dup2(nobody, fd)
        os.close(nobody)
        forkserver.serve(listener, dict(os.environ))
    else:
        listener.close()
        forkserver.retitle(command)
        run(command)


if __name__ == "__main__":
    main()
