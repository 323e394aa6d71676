"""Write the run folder of a long training run that is only simulated.

A plan of many LeNet-5 steps is simulated on GPUs, and each step is stretched by a random factor of
1.05 to 1.1; one step in 97 by up to 3.3. The folder has a result and a trace, as if measured.
"""

from functools import partial
from pathlib import Path

import numpy as np

from paceline.core.compare import compare, conform
from paceline.core.cost import Roofline
from paceline.core.outcome import Epoch
from paceline.core.plan import Kind
from paceline.core.settings import TrainSettings
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.timeline import Timeline
from paceline.planner import forecast, rank
from paceline.record.trace import write_trace
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.records.result import PlanRow, RunResult
from paceline.report import advice, metrics
from paceline.strategies import EXCHANGES

_BATCH, _EPOCHS, _MACHINE = 256, 20, "power8-p100"


def stretched(timeline: Timeline, seed: int = 0) -> Timeline:
    """Return the timeline as if measured, with each step stretched by a random factor."""
    draw = np.random.default_rng(seed)
    first = timeline.spans[0].on[0].owner
    steps = [span for span in timeline.spans if span.kind is Kind.STEP]
    ends = [0.0, *(span.end_s for span in steps if span.on[0].owner == first), timeline.makespan_s]
    slopes = 1.05 + 0.05 * draw.random(len(ends) - 1)
    slopes[50::97] *= 1 + 2 * draw.random(len(slopes[50::97]))
    later = partial(np.interp, xp=ends, fp=[0.0, *np.cumsum(slopes * np.diff(ends))])
    spans = (
        span._replace(start_s=float(later(span.start_s)), end_s=float(later(span.end_s)))
        for span in timeline.spans
    )
    return Timeline(spans, "measured")


def write_long_run(folder: Path, num_steps: int = 1000, workers: int = 4) -> None:
    """Write result.json and trace.json of a simulated run into an existing folder."""
    part = recorded("lenet5", _BATCH // workers)
    cores = find_machine(_MACHINE).for_workers(workers)
    forecasts = rank(
        forecast(part, cores, strategy, strategy.config(workers=workers), _BATCH)
        for strategy in EXCHANGES.values()
    )
    chosen = next(one for one in forecasts if one.strategy == "allreduce")
    strategy = EXCHANGES["allreduce"]
    plan = strategy.planning.plan(part, cores, chosen.config, Window(num_steps))
    measured = stretched(simulate(plan, Roofline.of(cores)))
    write_trace(folder / "trace.json", (chosen.timeline, measured))
    result = RunResult(
        origin="measured",
        id=f"20260102-030405-{num_steps}-steps",
        settings=TrainSettings(model="made-up", workers=workers, batch_size=_BATCH, epochs=_EPOCHS),
        strategy="allreduce",
        machine={"processor": "made up", "memory_bytes": 32 * 2**30, "paceline": "none"},
        plans=tuple(map(PlanRow.of, forecasts)),
        epochs=tuple(map(_epoch, range(_EPOCHS))),
        accuracy=_epoch(_EPOCHS - 1).score,
        predicted_step_s=chosen.step_s,
        step_s=measured.typical_step_s(),
        samples_per_s=_BATCH / measured.typical_step_s(),
        comparison=compare(chosen.timeline, measured),
        faults=tuple(conform(plan, measured, slack_s=1e-9)),
        peak_memory_bytes=(2**29,) * workers,
    )
    found = advice.findings(metrics.of_run(result, measured))
    result = result.model_copy(update={"findings": found})
    (folder / "result.json").write_text(result.model_dump_json())


def _epoch(number: int) -> Epoch:
    loss = 0.2 + 2 / (number + 1)
    return Epoch(
        number=number,
        train_loss=loss,
        test_loss=loss + 0.01 * number,
        score=0.98 - 0.6 / (number + 1),
        seconds=7.5,
    )
