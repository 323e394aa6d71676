"""Draw two steps of two runs, one above the other: picture.py RUN_A RUN_B PAGE.html."""

import sys
from dataclasses import replace
from pathlib import Path

from paceline.record.trace import read_timeline
from paceline.records.result import read_run
from paceline.report.steps import excerpt, steps_in_time


def main(folders: list[Path], page: Path) -> None:
    """Write a page with the runs' measured steps on one scale of time."""
    excerpts, names = [], []
    for folder in folders:
        excerpts.append(excerpt(read_timeline(folder / "trace.json", "measured")))
        names.append(read_run(folder).settings.strategy)
    longest = max(one.length_s for one in excerpts)
    figure = steps_in_time([replace(one, length_s=longest) for one in excerpts])
    for annotation, name in zip(figure.layout.annotations, names, strict=False):
        annotation.text = f"{name}: two steps, measured"
    figure.update_layout(width=1300, height=420, paper_bgcolor="white", plot_bgcolor="white")
    figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})


if __name__ == "__main__":
    *runs, target = map(Path, sys.argv[1:])
    main(runs, target)
