"""How large a long run's report is, and how soon Chromium shows it.

    python benchmarks/report/main.py [--quick]

Each case is a run that never was (long_run.py), so that no hours of training are needed; its page
is written by `write_report`, and opened in a new tab of a headless Chromium. With --quick once, and
the figures mean nothing, and are not written. Needs chromium.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import tables  # noqa: E402

import parts  # noqa: E402
from browser import CHROMIUM, Browser  # noqa: E402
from figures import spread  # noqa: E402
from long_run import write_long_run  # noqa: E402
from paceline.report import write_report  # noqa: E402

_CASES = {"20 steps, 2 workers": (20, 2), "1,000 steps, 4 workers": (1000, 4)}
_REPEATS = 11
_WINDOWS = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}


def pages(quick: bool) -> dict[str, Any]:
    """Return the figures of each case."""
    with TemporaryDirectory() as name, Browser(Path(name) / "profile") as browser:
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


if __name__ == "__main__":
    if CHROMIUM is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    parts.run(HERE, {"pages": pages}, tables.of)
