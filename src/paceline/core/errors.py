"""The errors that a user can cause or must know of.

Everything else is a bug and keeps its traceback. The command line prints one of these as a single
line and ends with exit code 2, or 1 if the input is not to blame.
"""

from signal import SIGINT
from typing import Self

_NOT_GIVEN = object()
_OBLIGATIONS = ("must ", "is missing")  # problems that continue the field as a sentence
_MOST_TEXT = 4000  # of an error
_MOST_SHOWN = 200  # of a value in it


class PacelineError(Exception):
    """Base of all errors that say in one line what was wrong, where, and what would be right.

    Whatever a file or a peer has put into the message, it is one line that a terminal can show.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message, _MOST_TEXT))


class InvalidInput(PacelineError):
    """A file, an option or a model that cannot be used as given.

    `field` names the setting, the file or the value, `problem` what is wrong with it. `got` is the
    value that was given, where `problem` says which it has to be; `hint` is what to do instead.
    Shown as "field: problem (got 1); hint", or "field must be at least 2 (got 1); hint".
    """

    def __init__(
        self, field: str, problem: str = "", *, got: object = _NOT_GIVEN, hint: str = ""
    ) -> None:
        if not problem:  # torch raises the error of a DataLoader's process by its traceback alone
            last_line = field.strip().rpartition("\n")[2]
            field, _, problem = last_line.rpartition("InvalidInput: ")[2].partition(": ")
        self.field, self.problem, self.got, self.hint = field, problem, got, hint
        super().__init__(self.told(field))

    def told(self, field: str) -> str:
        """Return the message, with another name for the field."""
        got = "" if self.got is _NOT_GIVEN else f" (got {self.got!r})"
        between = " " if self.problem.startswith(_OBLIGATIONS) else ": "
        hint = f"; {self.hint}" if self.hint else ""
        return between.join(filter(None, (field, self.problem))) + got + hint

    @classmethod
    def of(cls, message: str) -> Self:
        """Make the error of its text, as another process has sent it."""
        field, colon, problem = message.partition(": ")
        return cls(field, problem) if colon else cls("", message)


class WorkerLost(PacelineError):
    """A worker ended, or stopped answering, before the run was done."""


class WorkersFailed(PacelineError):
    """The workers ended with an error or by a signal: `reason`, if known.

    They have said it themselves if it `is_said`.
    """

    def __init__(self, exit_code: int, reason: str | None = None, *, is_said: bool = True) -> None:
        super().__init__(reason or f"the workers ended with exit code {exit_code}")
        self.exit_code, self.is_said = exit_code, is_said


class Interrupted(PacelineError):
    """The run was asked to stop, by the signal `number`, and saved after `num_steps`."""

    def __init__(self, message: str, num_steps: int, number: int = SIGINT) -> None:
        super().__init__(message)
        self.num_steps, self.exit_code = num_steps, 128 + number


class StepDiscarded(PacelineError):
    """A step whose backward pass failed on some rank: its gradients are discarded on all."""


class NonFinite(PacelineError):
    """Gradients that are NaN or infinite on some rank, which no codec carries."""


class CheckpointNotWritten(PacelineError):
    """A checkpoint that could not be written, as without space; those before it are still there."""


def printable(text: str, most: int) -> str:
    """Return a text on one line: ends of lines as spaces, and other control characters escaped.

    Of a longer one the first `most` characters are there, and "...".
    """
    if len(text) > most:
        text = text[:most] + "..."
    if text.isprintable():
        return text
    joined = " ".join(line.strip() for line in text.splitlines())
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in joined).strip()


def shown(value: object) -> str:
    """Return a value as Python writes it, cut to a length that an error can hold."""
    try:
        return printable(repr(value), _MOST_SHOWN)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to be shown"


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its text, as in "KeyError: 'x'"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
