"""Draw two steps of two runs, one above the other: picture.py RUN_A RUN_B PAGE.html."""

import json
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from paceline.record.trace import read_timeline
from paceline.records.result import read_run
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
    plotly = files("paceline.report").joinpath("plotly-basic.min.js").read_text("utf-8")
    draw = f"Plotly.newPlot('figure', {json.dumps(figure)})"
    scripts = f"<script>{plotly}</script><script>{draw}</script>"
    page.write_text(f'<!doctype html><meta charset="utf-8"><div id="figure"></div>{scripts}')


if __name__ == "__main__":
    *runs, target = map(Path, sys.argv[1:])
    main(runs, target)
