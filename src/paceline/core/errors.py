"""Errors that a user can cause or needs to know about.

All other errors are bugs and keep their traceback. The command line prints these errors as one line
and exits with code 2 for invalid input, otherwise 1.
"""

import re
from signal import SIGINT
from typing import Self

_NOT_GIVEN = object()
# If a problem begins with one of these words, no colon precedes it: "--steps must be".
_VERBS = ("must ", "is ", "has ", "cannot ", "requires ", "needs ", "does ", "and ")
# The field at the beginning of a message.
_FIELD = re.compile(rf"(.+?)(?:: | (?={'|'.join(_VERBS)}))")
_MOST_TEXT = 4000  # maximum characters of an error
_MOST_SHOWN = 200  # maximum characters of a value in an error


class PacelineError(Exception):
    """Base of all errors that explain in one line what is wrong, where, and how to fix it.

    Text from files or peers is made printable and limited to one line.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message, _MOST_TEXT))


class InvalidInput(PacelineError):
    """A file, option or model is not usable as given.

    `field`: the setting, file or value. `problem`: the fault or the requirement. `got`: the given
    value. `hint`: a remedy. The message is "field: problem (got 1); hint" or, if the problem begins
    with a verb, "field must be at least 2 (got 1); hint".
    """

    def __init__(
        self, field: str, problem: str = "", *, got: object = _NOT_GIVEN, hint: str = ""
    ) -> None:
        # If a DataLoader process raises this error, torch creates it again with a single argument:
        # the traceback, whose last line is the message.
        if not problem:
            last_line = field.strip().rpartition("\n")[2]
            field, problem = _parted(last_line.rpartition("InvalidInput: ")[2])
        self.field, self.problem, self.got, self.hint = field, problem, got, hint
        super().__init__(self.message_for(field))

    def message_for(self, field: str) -> str:
        """Return the error's message with another name, `field`, for the wrong setting."""
        got = "" if self.got is _NOT_GIVEN else f" (got {self.got!r})"
        between = " " if self.problem.startswith(_VERBS) else ": "
        hint = f"; {self.hint}" if self.hint else ""
        return between.join(filter(None, (field, self.problem))) + got + hint

    @classmethod
    def of(cls, message: str) -> Self:
        """Create the error from its message, which another process sent."""
        return cls(*_parted(message))


def _parted(message: str) -> tuple[str, str]:
    """Split an InvalidInput's message into field (may be empty) and problem."""
    if (match := _FIELD.match(message)) is None:
        return "", message
    return match[1], message[match.end() :]


class WorkerLost(PacelineError):
    """A worker ended or stopped answering before the end of the run."""


class WorkersFailed(PacelineError):
    """The workers ended with an error or by a signal.

    `reason`: description of the error, if known. `is_said`: whether a worker has printed it.
    """

    def __init__(self, exit_code: int, reason: str | None = None, *, is_said: bool = True) -> None:
        super().__init__(reason or f"the workers ended with exit code {exit_code}")
        self.exit_code, self.is_said = exit_code, is_said


class Interrupted(PacelineError):
    """The signal `number` stopped the run after `num_steps` steps, which are saved."""

    def __init__(self, message: str, num_steps: int, number: int = SIGINT) -> None:
        super().__init__(message)
        self.num_steps, self.exit_code = num_steps, 128 + number


class StepDiscarded(PacelineError):
    """Backward failed on some rank, so all ranks discard the step's gradients."""


class NonFinite(PacelineError):
    """Some rank has NaN or infinite gradients, which codecs cannot represent."""


class CheckpointNotWritten(PacelineError):
    """Writing a checkpoint failed, for example on a full disk; earlier checkpoints remain."""


def printable(text: str, most: int) -> str:
    """Cut a text after `most` characters, and make it one printable line.

    A cut text ends in "...". Line ends become spaces; other control characters are escaped.
    """
    if len(text) > most:
        text = text[:most] + "..."
    if text.isprintable():
        return text
    joined = " ".join(line.strip() for line in text.splitlines())
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in joined).strip()


def shown(value: object) -> str:
    """Return the repr of a value, shortened for an error."""
    try:
        return printable(repr(value), _MOST_SHOWN)
    except ValueError:  # Python refuses to print integers with more than 4,300 digits
        return f"a {type(value).__name__} that is too long to be shown"


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its text: "KeyError: 'x'"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
