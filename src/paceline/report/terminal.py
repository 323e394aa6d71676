"""Terminal output: consoles, log messages, tables, and lines about epochs."""

import logging
from typing import Literal

from rich.console import Console
from rich.table import Table

from paceline.core.outcome import Epoch, is_share
from paceline.report import tables

TRACED = "Seconds per traced step (tracing slows short steps)"
_JUSTIFY: dict[str, Literal["left", "right"]] = {"text": "left", "number": "right"}


def console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Return a rich console that prints texts unchanged: it interprets no markup or emoji codes.

    `quiet`: print nothing.
    """
    return Console(quiet=quiet, stderr=stderr, markup=False, emoji=False, highlight=False)


class _PlainLines(logging.Handler):
    """Prints log messages through a console, so that they do not break a progress bar."""

    def __init__(self) -> None:
        super().__init__()
        self._console = console(stderr=True)

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), soft_wrap=True)


def log_to_stderr(*, quiet: bool = False) -> None:
    """Print the package's log messages to standard error; if `quiet`, only warnings."""
    root = logging.getLogger("paceline")
    others = [one for one in root.handlers if not isinstance(one, _PlainLines)]
    root.handlers = [*others, _PlainLines()]
    root.setLevel(logging.WARNING if quiet else logging.INFO)


def shown(title: str, content: tables.Table, *, gap: int | None = None) -> Table:
    """Convert a table to a rich table with a box, or with `gap` spaces after each column."""
    style = {} if gap is None else {"box": None, "padding": (0, gap, 0, 0)}
    grid = Table(title=title, title_justify="left", **style)  # type: ignore[arg-type]
    for column in content.columns:
        grid.add_column(column.name, justify=_JUSTIFY[column.kind])
    for row in content.rows:
        grid.add_row(*row)
    return grid


def epoch_line(epoch: Epoch, epochs: int | None, score: str) -> str:
    """Format an epoch's losses and score in a line.

    `epochs`: the run's number of epochs, if known. `score`: name of the score.
    """
    of = "" if epochs is None else f"/{epochs}"
    line = f"epoch {epoch.number + 1}{of}: train loss {epoch.train_loss:.4f}"
    return line + tested(epoch.test_loss, epoch.score, score)


def tested(test_loss: float | None, score: float | None, name: str) -> str:
    """Format the results of a test, such as ", test loss 0.1234, accuracy 98.00%"; "" for None.

    `name`: name of the score.
    """
    loss = "" if test_loss is None else f", test loss {test_loss:.4f}"
    if score is None:
        return loss
    shown = f"{score:.2%}" if is_share(name) else f"{score:.4g}"
    return f"{loss}, {name} {shown}"
