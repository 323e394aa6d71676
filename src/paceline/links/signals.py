"""SIGINT and SIGTERM: the first one ends a command in order, the second one at once.

    a command that ...               at its first signal
    imports modules                  says so in one line, and ends
    does anything else               raises Stopped in the main thread, which closes what is open
    trains (links.interruption)      notes it, saves its state after a step, and stops

A process that a command has started ends without a word, for the command says it; or has its hub
stop the run (links.worker_signals). Exit codes are 128 and the number of the signal, as in shells.

A command calls `handle_in_command` before all that takes time: nothing large is imported here.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODES = tuple(128 + number for number in SIGNALS)
_PARTICIPLES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_IMPORTING = "<frozen importlib._bootstrap>"
_CLOSING_S = 20.0  # for a command to close what is open
_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"  # a bar that shows progress hides it

Handler = Callable[[int, FrameType | None], Any]


class Stopped(BaseException):
    """A command was asked to end by the signal `number`; `why` follows in the line that says so.

    No Exception: no code that goes on after errors goes on after it.
    """

    def __init__(self, number: int, why: str = "") -> None:
        super().__init__(number)
        self.number, self.why = number, why


def participle(number: int) -> str:
    """Return what a run is after this signal: interrupted, or terminated."""
    return _PARTICIPLES[signal.Signals(number)]


def say(text: str) -> None:
    """Write the one line of a command that a signal ends; also from a handler of signals."""
    shown = _SHOW_CURSOR if os.isatty(2) else b""
    with suppress(OSError):  # nobody reads it
        os.write(2, shown + f"paceline: {text}\n".encode())


class CommandHandler:
    """Ends a command: in order at the first signal, at once at the second."""

    def __init__(self) -> None:
        self.received: int | None = None  # the first signal
        self._is_closing = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.received is not None:
            self.leave("; ended at once by a second signal")
        self.received = number
        # An exception amid imports may be lost in them, and then nothing is open but processes
        # that end with this one.
        if _is_importing(frame):
            self.leave()
        if not self._is_closing:
            self.stop(number)

    def stop(self, number: int, why: str = "") -> NoReturn:
        """Raise Stopped. The process ends all the same if that is lost, or does not get on."""
        self._is_closing = True
        _thread.start_new_thread(self._leave_late, (number,))  # without locks, as in a handler
        raise Stopped(number, why)

    def leave(self, why: str = "") -> NoReturn:
        """Say it and end this process; the kernel ends those that it has started."""
        number = self.received or signal.SIGINT
        say(f"{participle(number)}{why}")
        os._exit(128 + number)

    def unraisable(self, lost: "sys.UnraisableHookArgs") -> None:
        """End the command also where Stopped was raised in code that can raise nothing."""
        if isinstance(lost.exc_value, Stopped):
            self.received = lost.exc_value.number
            self.leave()
        sys.__unraisablehook__(lost)

    def _leave_late(self, number: int) -> None:
        time.sleep(_CLOSING_S)
        self.received = number
        self.leave()


def handle_in_command() -> None:
    """Have the first signal end this command in order, and the second one at once."""
    handler = CommandHandler()
    sys.unraisablehook = handler.unraisable
    _handle(handler)


def handle_in_worker() -> None:
    """Have a signal end this process, which a command has started, without a word."""
    _handle(lambda number, _: os._exit(128 + number))


def handle_as_python() -> None:
    """Handle signals as Python does at the start of a program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _handle(handler: Handler) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # `blocked` when this process was started


@contextmanager
def blocked() -> Iterator[None]:
    """Start processes that get no signal before they handle it; this one handles it afterwards.

    They inherit the mask. Here it does not suffice: the kernel gives the signal to a thread that
    has not blocked it, as those of a store, and Python handles it in the main one all the same.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    noted: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with handled_by(lambda number, _: noted.append(number)) if is_main else nullcontext():
            yield
    finally:
        for number in noted:
            signal.raise_signal(number)  # in this thread, where it waits for the next line
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handled_by(handler: Handler) -> Iterator[dict[int, Any]]:
    """Have signals handled so meanwhile; yields the handlers before, by the signal's number.

    Call it in the main thread. A handler that was not set from Python stays, as Python could not
    put it back.
    """
    before: dict[int, Any] = {}
    try:
        for number in SIGNALS:
            if signal.getsignal(number) is not None:
                before[number] = signal.signal(number, handler)
        yield before
    finally:
        for one, earlier in before.items():
            signal.signal(one, earlier)


def pass_on(before: Any, number: int, frame: FrameType | None) -> None:
    """Handle a signal as the handler before does, or end the program as its default does."""
    if not callable(before):
        raise SystemExit(128 + number)
    before(number, frame)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
