"""Signals to a worker of a hub or a coordinator: it tells the one that has started it.

    hub      told = SignalsOfWorkers(); process = told.start("package.module", settings)
    worker   tell_starter()                    # its own signals go into the pipe
    hub      told.poll(names)                  # stops the run, and names the worker

A worker that ended by itself would be one that was lost, with which the others go on. After Ctrl-C
at a terminal it gets the signal, too, and is needed for what the hub saves.
"""

import os
import signal
import struct
from collections.abc import Mapping, Sequence

from paceline.links.interruption import told_of_signal
from paceline.links.processes import STANDARD_ERROR, Process, module_command, start
from paceline.links.signals import EXIT_CODES, SIGNALS, handle_in_worker

_DESCRIPTOR = "PACELINE_TELLS_SIGNALS"
_RECORD = struct.Struct("2i")  # process, signal


class SignalsOfWorkers:
    """A pipe of which each worker has the writing end."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)

    def start(self, module: str, argument: str, fds: Sequence[int] = (), **more: str) -> Process:
        """Start a worker that runs a module with one argument, and inherits `fds`.

        `more` is added to its environment. Raises OSError if it cannot be started.
        """
        return start(
            module_command(module, argument),
            environment={_DESCRIPTOR: str(self._writing), **more},
            stdout=STANDARD_ERROR,  # standard output is for the result alone
            pass_fds=(*fds, self._writing),
        )

    def poll(self, names: Mapping[int, str]) -> None:
        """Stop the run if a worker was signalled. `names`: of workers, by process number."""
        if self._writing < 0:
            return
        try:
            record = os.read(self._reading, _RECORD.size)
        except BlockingIOError:
            return
        pid, number = _RECORD.unpack(record)
        told_of_signal(number, f"{names.get(pid, 'a worker')} (process {pid})")

    def ended(self, process: Process, name: str) -> None:
        """Stop the run if a worker has ended by a signal in order, before it could tell."""
        code = process.poll()
        if code in EXIT_CODES:
            told_of_signal(code - 128, f"{name} (process {process.pid})")

    def close(self) -> None:
        """Close the pipe, if it is open."""
        if self._writing >= 0:
            os.close(self._reading)
            os.close(self._writing)
            self._reading = self._writing = -1


def tell_starter() -> None:
    """Have the first signal told to the process that has started this one; the second ends it.

    Where that one does not listen, as it gets them itself, SIGINT is ignored and SIGTERM ends this.
    """
    if _DESCRIPTOR not in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    fd = int(os.environ.pop(_DESCRIPTOR))

    def tell(number: int, _: object) -> None:
        handle_in_worker()
        try:
            os.write(fd, _RECORD.pack(os.getpid(), number))  # whole: it is short
        except OSError:
            os._exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, tell)
