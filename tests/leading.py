"""Run a Python command in a folder, in a new session and with its own fork server.

    python leading.py FOLDER python -m MODULE ...

In a forked process, the new fork server inherits the imports of this process.
"""

import os
import signal
import sys

from paceline.links import forkserver
from paceline.native import die_with_parent


def main() -> None:
    folder, *command = sys.argv[1:]
    os.chdir(folder)
    os.setsid()
    leader = os.getpid()
    os.environ[forkserver.ADDRESS], listener = forkserver.listen()
    if os.fork() == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        die_with_parent(leader)
        nobody = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):  # otherwise the server would keep the pipes open
            os.dup2(nobody, fd)
        os.close(nobody)
        forkserver.serve(listener, dict(os.environ))
    else:
        listener.close()
        forkserver.retitle(command)
        forkserver.run(command)


if __name__ == "__main__":
    main()
