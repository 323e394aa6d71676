"""Measure the size of a long run's report, and how soon Chromium shows it.

Each case is a simulated run (long_run.py), because a real one would train for hours. `write_report`
writes its page, and a new tab of headless Chromium opens the page. Requires chromium.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from figures import Part, shown, spread, table
from long_run import write_long_run
from paceline.report import write_report

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from browser import Browser

_CASES = {"20 steps, 2 workers": (20, 2), "1,000 steps, 4 workers": (1000, 4)}
_REPEATS = 11
_WINDOWS = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}


def pages(quick: bool) -> dict[str, Any]:
    """Return the figures of each case."""
    with TemporaryDirectory() as name, Browser() as browser:
        return {
            case: _measured(browser, Path(name), case, 3 if quick else _REPEATS) for case in _CASES
        }


def _measured(browser: Browser, folder: Path, case: str, repeats: int) -> dict[str, Any]:
    run = folder / case
    run.mkdir()
    write_long_run(run, *_CASES[case])
    started = time.monotonic()
    path = write_report(run)
    written_s = time.monotonic() - started
    windows = {name: _opened(browser, path, *size, repeats) for name, size in _WINDOWS.items()}
    return {"nbytes": path.stat().st_size, "written_s": written_s, "windows": windows}


def _opened(browser: Browser, path: Path, width: int, height: int, repeats: int) -> dict[str, Any]:
    opened, complaints = [], 0
    for _ in range(repeats):
        page = browser.page(width, height)
        opened.append(page.open(path))
        complaints += len(page.complaints)
        page.close()
    return {
        "first_screen_s": spread([one.first_screen_s for one in opened]),
        "all_figures_s": spread([one.all_figures_s for one in opened]),
        "complaints": complaints,
    }


def text(figures: Mapping[str, Any]) -> str:
    """Return the table of all cases."""
    head = (
        *("run", "page, MB", "written in, s", "window"),
        *("first screen, s, median [quartiles]", "all figures, s", "complaints of the console"),
    )
    return table("Reports of long runs", head, _lines(figures))


def _lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for case, row in figures.items():
        for window, found in row["windows"].items():
            yield (
                case,
                f"{row['nbytes'] / 1e6:.2f}",
                f"{row['written_s']:.2f}",
                window,
                shown(found["first_screen_s"]),
                shown(found["all_figures_s"]),
                str(found["complaints"]),
            )


PARTS = {"pages": Part(pages, text)}
