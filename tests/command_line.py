"""The command line in this process, and folders of runs for its commands."""

import json
import sys
from pathlib import Path
from typing import Any

from findings import run_result
from paceline.commands.app import run
from paceline.core.compare import compare
from paceline.core.cost import compute_lane
from paceline.core.plan import Kind
from paceline.core.settings import TrainSettings
from paceline.core.timeline import Span, Timeline
from paceline.record.trace import write_trace
from plan_rows import plan_row
from refusals import refused_field

MACHINE = Path(__file__).parents[1] / "machines" / "two-core-epyc.toml"
COMPUTE = (compute_lane("cpu0"),)


class Line:
    """The command line in this process; a call sets `code`, `out` and `err`."""

    def __init__(self, monkeypatch, capsys) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> "Line":
        self._monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        self.code = run()
        self.out, self.err = self._capsys.readouterr()
        return self

    @property
    def found(self) -> Any:
        """The JSON object that a successful command with --json printed."""
        assert (self.code, self.err) == (0, "")
        return json.loads(self.out)

    @property
    def refused(self) -> str:
        """The field of the refusal that the command printed in one line."""
        assert (self.code, self.out) == (2, ""), self.err
        return refused_field(self.err)


def steps(seconds: float, origin, num_steps: int = 3) -> Timeline:
    spans = []
    for i in range(num_steps):
        start, middle, end = (seconds * (i + part) for part in (0, 0.5, 1))
        spans += [
            Span(Kind.FORWARD, i, "a", 0, COMPUTE, start, middle),
            Span(Kind.STEP, i, "", 0, COMPUTE, middle, end),
        ]
    return Timeline(spans, origin)


def write_run(folder: Path, predicted_s: float, measured_s: float) -> Path:
    folder.mkdir()
    timelines = steps(predicted_s, "predicted"), steps(measured_s, "measured")
    write_trace(folder / "trace.json", timelines)
    result = run_result(
        id=folder.name,
        settings=TrainSettings(model="lenet5", workers=1),
        plans=(plan_row(workers=1, step_s=predicted_s),),
        predicted_step_s=predicted_s,
        step_s=measured_s,
        comparison=compare(*timelines),
        peak_memory_bytes=(1,),
    )
    (folder / "result.json").write_text(result.model_dump_json())
    return folder
