"""SIGINT and SIGTERM: the first signal ends a command in order, the second immediately.

    a command that ...               at its first signal
    imports modules                  prints one line and ends
    does anything else               raises Stopped in the main thread, which closes resources
    trains (links.interruption)      notes it, saves its state after a step, and stops

A process started by a command ends silently, since the command prints the line, or lets its hub
stop the run (links.worker_signals). Exit codes are 128 plus the signal's number, as in shells.

A command calls `handle_in_command` before anything slow, so this module imports nothing large.
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
EXIT_CODES = tuple(128 + number for number in SIGNALS)
_PARTICIPLES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_IMPORTING = "<frozen importlib._bootstrap>"
_CLOSING_S = 20.0  # for a command to close its resources
_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"  # progress bars hide the cursor

Handler = Callable[[int, FrameType | None], Any]


class Stopped(BaseException):
    """A command was ended by the signal `number`; `why` follows in its last line.

    Not an Exception, so that code that continues after errors does not catch it.
    """

    def __init__(self, number: int, why: str = "") -> None:
        super().__init__(number)
        self.number, self.why = number, why


def participle(number: int) -> str:
    """Return "interrupted" for SIGINT, "terminated" for SIGTERM."""
    return _PARTICIPLES[signal.Signals(number)]


def say(text: str) -> None:
    """Print the last line of a command that a signal ends; usable in signal handlers."""
    shown = _SHOW_CURSOR if os.isatty(2) else b""
    with suppress(OSError):  # standard error may be closed
        os.write(2, shown + f"paceline: {text}\n".encode())


class CommandHandler:
    """Ends a command: in order at the first signal, immediately at the second."""

    def __init__(self) -> None:
        self.received: int | None = None  # the first signal
        self._is_closing = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.received is not None:
            self.leave("; ended immediately by a second signal")
        self.received = number
        # Imports may swallow an exception; the only open resources then are processes that end
        # with this one.
        if _is_importing(frame):
            self.leave()
        if not self._is_closing:
            self.stop(number)

    def stop(self, number: int, why: str = "") -> NoReturn:
        """Raise Stopped, and end the process after 20 s if that has no effect."""
        self._is_closing = True
        _thread.start_new_thread(self._leave_late, (number,))  # takes no locks, unlike threading
        raise Stopped(number, why)

    def leave(self, why: str = "") -> NoReturn:
        """Print the last line and end this process; the kernel ends its children."""
        number = self.received or signal.SIGINT
        say(f"{participle(number)}{why}")
        os._exit(128 + number)

    def unraisable(self, lost: "sys.UnraisableHookArgs") -> None:
        """End the command even if Stopped was raised where exceptions are ignored."""
        if isinstance(lost.exc_value, Stopped):
            self.received = lost.exc_value.number
            self.leave()
        sys.__unraisablehook__(lost)

    def _leave_late(self, number: int) -> None:
        time.sleep(_CLOSING_S)
        self.received = number
        self.leave()


def handle_in_command() -> None:
    """Let the first signal end this command in order, the second immediately."""
    handler = CommandHandler()
    sys.unraisablehook = handler.unraisable
    _handle(handler)


def handle_in_worker() -> None:
    """Let a signal end this process silently; the command that started it prints the line."""
    _handle(lambda number, _: os._exit(128 + number))


def handle_as_python() -> None:
    """Handle signals as a new Python program does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _handle(handler: Handler) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # `blocked` when this process was started


@contextmanager
def blocked() -> Iterator[None]:
    """Start processes that get no signal before they handle it; handle it here afterwards.

    They inherit the mask. In this process the mask does not suffice: a thread without it, such as a
    store's, gets the signal, and Python runs the handler in the main thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    noted: list[int] = []
    try:
        with handled_by(lambda number, _: noted.append(number)):
            yield
    finally:
        for number in noted:
            signal.raise_signal(number)  # pending in this thread until the next line
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handled_by(handler: Handler) -> Iterator[dict[int, Any]]:
    """Handle signals by `handler` within the block; yields the previous handlers by number.

    Does nothing outside the main thread, which alone handles signals. A handler not set from Python
    stays, since Python cannot restore it.
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
    """Call the previous handler, or end the program if it was the default."""
    if not callable(before):
        raise SystemExit(128 + number)
    before(number, frame)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
