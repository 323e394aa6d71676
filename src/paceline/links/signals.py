"""SIGINT and SIGTERM: the first signal ends a command gracefully, the second immediately.

    a command that ...               at its first signal
    imports modules                  prints one line and ends
    does anything else               raises Stopped in the main thread, which closes resources
    trains (links.interruption)      notes the signal, saves its state after a step, and stops

A process started by a command ends silently, because the command prints the line. A worker of a hub
(parameter server) reports the signal, and the hub stops the run (links.worker_signals). A command
calls `handle_in_command` before anything slow, so this module imports nothing large.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODES = tuple(128 + number for number in SIGNALS)  # as in shells
_PARTICIPLES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_IMPORTING = "<frozen importlib._bootstrap>"
_CLOSING_S = 20.0  # time that a command has for closing its resources
_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"  # progress bars hide the cursor

Handler = Callable[[int, FrameType | None], Any]


class Stopped(BaseException):
    """Ends a command after the signal `number`; `why` is added to the command's last line.

    The base class is BaseException, so that `except Exception` does not catch Stopped.
    """

    def __init__(self, number: int, why: str = "") -> None:
        super().__init__(number)
        self.number, self.why = number, why


def participle(number: int) -> str:
    """Return "interrupted" for SIGINT, "terminated" for SIGTERM."""
    return _PARTICIPLES[signal.Signals(number)]


def say(text: str) -> None:
    """Print the last line of a command that a signal ends; safe in signal handlers."""
    shown = _SHOW_CURSOR if os.isatty(2) else b""
    with suppress(OSError):  # standard error may be closed
        os.write(2, shown + f"paceline: {text}\n".encode())


class CommandHandler:
    """Ends a command: gracefully at the first signal, immediately at the second signal."""

    def __init__(self) -> None:
        self.received: int | None = None  # the first signal
        self._is_closing = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.received is not None:
            self.leave("; ended immediately by a second signal")
        self.received = number
        # Imports may swallow an exception, so end at once. During imports the only open resources
        # are processes, which end with this process.
        if _is_importing(frame):
            self.leave()
        if not self._is_closing:
            self.stop(number)

    def stop(self, number: int, why: str = "") -> NoReturn:
        """Raise Stopped; end the process if it still runs 20 s later."""
        self._is_closing = True
        _thread.start_new_thread(self._leave_late, (number,))  # takes no locks, unlike `threading`
        raise Stopped(number, why)

    def leave(self, why: str = "") -> NoReturn:
        """Print the last line and end this process; the kernel ends its children."""
        number = self.received or signal.SIGINT
        say(f"{participle(number)}{why}")
        os._exit(128 + number)

    def unraisable(self, lost: "sys.UnraisableHookArgs") -> None:
        """End the command if Python ignores Stopped, as in `__del__`; used as unraisablehook."""
        if isinstance(lost.exc_value, Stopped):
            self.received = lost.exc_value.number
            self.leave()
        sys.__unraisablehook__(lost)

    def _leave_late(self, number: int) -> None:
        time.sleep(_CLOSING_S)
        self.received = number
        self.leave()


def handle_in_command() -> None:
    """Let the first signal end this command gracefully, and the second immediately."""
    handler = CommandHandler()
    sys.unraisablehook = handler.unraisable
    _handle(handler)


def handle_in_worker() -> None:
    """Let a signal end this process silently; the parent process reports the signal."""
    _handle(lambda number, _: os._exit(128 + number))


def _handle(handler: Handler) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)
    # The parent process may have started this process inside `blocked`, so unblock signals.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def blocked() -> Iterator[None]:
    """Delay signals inside the `with` block, and handle them in this process after it.

    The thread's signal mask blocks them; a process started meanwhile inherits the mask. Another
    thread, such as a store's, may still receive a signal, and Python then calls the handler in the
    main thread. So a temporary handler notes these signals, and they are raised after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    noted: list[int] = []
    try:
        with handled_by(lambda number, _: noted.append(number)):
            yield
    finally:
        for number in noted:
            signal.raise_signal(number)  # pending until the next line unblocks signals
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handled_by(handler: Handler) -> Iterator[dict[int, Any]]:
    """Handle signals by `handler` inside the block; yield the previous handlers by signal number.

    Does nothing outside the main thread, because only the main thread can set handlers. A handler
    that was not set from Python is not replaced, because Python could not restore it.
    """
    before: dict[int, Any] = {}
    try:
        is_main = threading.current_thread() is threading.main_thread()
        for number in SIGNALS if is_main else ():
            if signal.getsignal(number) is not None:
                before[number] = signal.signal(number, handler)
        yield before
    finally:
        for one, earlier in before.items():
            signal.signal(one, earlier)


def pass_on(before: Any, number: int, frame: FrameType | None) -> None:
    """Call the previous handler `before`; end the program if `before` is the default handler."""
    if not callable(before):
        raise SystemExit(128 + number)
    before(number, frame)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back
    return frame is not None
