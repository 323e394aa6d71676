"""Report the signals of workers to the hub (parameter server) or coordinator that started them.

    hub      signals = WorkerSignals(); process = signals.start("package.module", settings)
    worker   report_signals()                  # writes its signals into the pipe
    hub      signals.poll(names)               # stops the run, and names the worker

Without reports, a signal would end a worker; the worker would count as lost, and the others would
continue. Ctrl-C at a terminal signals the hub and all workers, but the hub still needs the workers
to save their state.
"""

import os
import signal
import struct
from collections.abc import Mapping, Sequence

from paceline.links.interruption import stop_by_worker_signal
from paceline.links.processes import STANDARD_ERROR, Process, module_command, start
from paceline.links.signals import EXIT_CODES, SIGNALS, handle_in_worker

_DESCRIPTOR = "PACELINE_TELLS_SIGNALS"
_RECORD = struct.Struct("2i")  # process number, signal number


class WorkerSignals:
    """A pipe into which all workers write the signals they receive."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)

    def start(self, module: str, argument: str, fds: Sequence[int] = (), **more: str) -> Process:
        """Start a worker that inherits `fds` and the environment variables `more`."""
        return start(
            module_command(module, argument),
            environment={_DESCRIPTOR: str(self._writing), **more},
            stdout=STANDARD_ERROR,  # standard output is reserved for the command's result
            pass_fds=(*fds, self._writing),
        )

    def poll(self, names: Mapping[int, str]) -> None:
        """Stop the run if a worker has reported a signal.

        `names`: name of each worker for the error, by process number.
        """
        if self._writing < 0:
            return
        try:
            record = os.read(self._reading, _RECORD.size)
        except BlockingIOError:
            return
        pid, number = _RECORD.unpack(record)
        stop_by_worker_signal(number, f"{names.get(pid, 'a worker')} (process {pid})")

    def ended(self, process: Process, name: str) -> None:
        """Stop the run if a signal ended a worker before it could report the signal."""
        code = process.poll()
        if code in EXIT_CODES:
            stop_by_worker_signal(code - 128, f"{name} (process {process.pid})")

    def close(self) -> None:
        """Close the pipe, if it is open."""
        if self._writing >= 0:
            os.close(self._reading)
            os.close(self._writing)
            self._reading = self._writing = -1


def report_signals() -> None:
    """Handle signals: report the first to the hub or coordinator; the second ends this process.

    Without a pipe for reports, SIGTERM ends this process, and SIGINT is ignored, because Ctrl-C
    also signals the process that started this process.
    """
    if _DESCRIPTOR not in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    fd = int(os.environ.pop(_DESCRIPTOR))

    def tell(number: int, _: object) -> None:
        handle_in_worker()
        try:
            os.write(fd, _RECORD.pack(os.getpid(), number))  # atomic, because it is short
        except OSError:
            os._exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, tell)
