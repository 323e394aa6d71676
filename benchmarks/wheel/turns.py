"""Draw figure 4 of Du et al. 2017 from a real run: two workers alternate on a device.

AlexNet with real arithmetic, 16 images per worker; hub and body on one-core hosts at 200 Mbit/s.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hosts import TwoHosts
from hub_and_bodies import carried_out, idle
from real import MODEL

import lanes
from figures import table
from paceline.core.plan import Kind
from paceline.core.timeline import Span, Timeline
from paceline.record.trace import read_timeline

_RATE, _SAMPLES, _LANES = "200mbit", 16, 2
_TURNS = 3  # turns of each worker in the picture


def measure(quick: bool) -> dict[str, Any]:
    """Return some turns of the run's timeline, and the idle share of the body's device."""
    steps, batch = 6 if quick else 20, _SAMPLES * _LANES
    data = f"synthetic:3x227x227,samples={batch * steps}"
    words = ["hub", MODEL, "--data", data, "--batch-size", str(batch)]
    words += ["--epochs", "1", "--momentum", "0.9", "--learning-rate", "0.0001"]
    with TemporaryDirectory() as folder, TwoHosts(_RATE) as hosts:
        trace = Path(folder) / "trace.json"
        result = carried_out(hosts, words, (1,), workers=_LANES, lanes=_LANES, trace=trace)
        timeline = read_timeline(trace, "measured")
    start_s, end_s = _stretch(timeline, 1 if quick else _TURNS)
    return {
        **idle(result),
        "stretch_s": [start_s, end_s],
        "lanes": {
            str(lane): [
                [span.name, span.kind.value, span.start_s, span.end_s]
                for span in track
                if span.end_s > start_s and span.start_s < end_s
            ]
            for lane, track in timeline.tracks.items()
        },
    }


def _stretch(timeline: Timeline, turns: int) -> tuple[float, float]:
    """Return start and end of some turns of worker 0 in the middle of the trace."""
    begins: dict[int, float] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        if span.kind is Kind.BACKWARD and span.worker == 0:
            begins.setdefault(span.step, span.start_s)
    moments = list(begins.values())
    first = max(0, (len(moments) - turns - 1) // 2)
    return moments[first], moments[first + turns]


def drawn(figures: dict[str, Any]) -> str:
    """Return the picture."""
    rows = [
        (lane, [Span(Kind(kind), 0, "", None, (), start, end) for _, kind, start, end in spans])
        for lane, spans in figures["lanes"].items()
    ]
    start_s, end_s = figures["stretch_s"]
    title = "wheel, measured: AlexNet, 16 images a worker, two lanes, 200 Mbit/s: "
    return lanes.picture(f"{title}{end_s - start_s:.2f} s", rows, start_s, end_s)


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    rows = [
        (device, f"{figures['predicted_idle'].get(device, 0):.1%}", f"{idle:.1%}")
        for device, idle in figures["idle"].items()
    ]
    return table("Idle devices", ("device", "predicted", "measured"), rows)
