"""The errors that a user can cause or must know of.

Everything else is a bug and keeps its traceback. The command line prints one of these as a single
line and ends with exit code 2, or 1 if the input is not to blame.
"""


class PacelineError(Exception):
    """Base of all errors that say in one line what was wrong, where, and what would be right."""


class InvalidInput(PacelineError):
    """A file, an option or a model that cannot be used as given."""


class WorkerLost(PacelineError):
    """A worker ended, or stopped answering, before the run was done."""


class WorkersFailed(PacelineError):
    """The workers ended with an error that they have reported themselves: `reason`, if known."""

    def __init__(self, exit_code: int, reason: str | None = None) -> None:
        super().__init__(reason or f"the workers ended with exit code {exit_code}")
        self.exit_code = exit_code


class Interrupted(PacelineError):
    """The run was asked to stop by Ctrl-C, and saved after `num_steps`."""

    def __init__(self, message: str, num_steps: int) -> None:
        super().__init__(message)
        self.num_steps = num_steps


class StepDiscarded(PacelineError):
    """A step whose backward pass failed on some rank: its gradients are discarded on all."""


class NonFinite(PacelineError):
    """Gradients that are NaN or infinite on some rank, which no codec carries."""


class CheckpointNotWritten(PacelineError):
    """A checkpoint that could not be written, as without space; those before it are still there."""


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its text, as in "KeyError: 'x'"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
