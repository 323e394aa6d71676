"""The bar of a run as a terminal shows it."""

import io

from rich.console import Console

from paceline.runs.progress import TerminalProgress


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def test_a_run_opens_with_a_bar_that_leaves_before_anything_is_printed():
    console = terminal()
    progress = TerminalProgress(console, "training")
    with progress.measuring(4):
        assert console._live_stack  # a bar is drawn
    assert not console._live_stack
    progress.begin(20, "steps")
    progress.advance()
    progress.close()
    shown = console.file.getvalue()
    assert shown.index("measuring") < shown.index("about 4 s") < shown.index("training")
    assert "1/20" in shown


def test_without_a_terminal_there_is_no_bar():
    console = Console(file=io.StringIO())
    progress = TerminalProgress(console, "training")
    with progress.measuring(4):
        pass
    progress.begin(20, "steps")
    progress.close()
    assert not console.file.getvalue()
