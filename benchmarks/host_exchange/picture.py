"""Draw two steps of two runs, one above the other: picture.py RUN_A RUN_B PAGE.html."""

import sys
from dataclasses import replace
from pathlib import Path

from paceline.record.trace import read_timeline
from paceline.records.result import read_run
from paceline.report.figures import figure_element
from paceline.report.page import write_page
from paceline.report.steps import excerpt, steps_in_time


def main(folders: list[Path], page: Path) -> None:
    """Write a page with the runs' measured steps on one scale of time."""
    excerpts = []
    for folder in folders:
        shown = excerpt(read_timeline(folder / "trace.json", "measured"))
        excerpts.append(
            replace(shown, title=f"{read_run(folder).settings.strategy}: {shown.title}")
        )
    longest = max(one.length_s for one in excerpts)
    figure = steps_in_time([replace(one, length_s=longest) for one in excerpts])
    write_page(page, "Two steps", [figure_element(figure, "steps")])


if __name__ == "__main__":
    *runs, target = map(Path, sys.argv[1:])
    main(runs, target)
