"""A profile with default values, for tests of its readers."""

from pathlib import Path
from typing import Any

from command_line import steps
from paceline.record.trace import write_trace
from paceline.records.profile import (
    AgreementRow,
    AttemptRow,
    LargestBatch,
    LayerRow,
    OperatorRow,
    OverheadRow,
    ProfileResult,
    ProfileSettings,
    Quartiles,
    ResourceRow,
    StageRow,
    TensorMemory,
    WorkerMemoryRow,
)

STAGES = {"load": 0.5, "forward": 3, "backward": 5, "update": 1}
STAGES |= {"hidden": 2, "exposed": 0.25, "idle": 0.25}


def spread(seconds: float) -> Quartiles:
    return Quartiles(median_s=seconds, lower_s=0.9 * seconds, upper_s=1.1 * seconds)


def profile_result(stages: dict[str, float] | None = None, **values: Any) -> ProfileResult:
    """Return a profile with a step of 10 ms; `stages`: other times in milliseconds."""
    parts = {stage: 1e-3 * value for stage, value in (STAGES | (stages or {})).items()}
    step_s = sum(seconds for stage, seconds in parts.items() if stage != "hidden")
    given: dict[str, Any] = {
        "id": "20261122-030000-lenet5-abcd",
        "settings": ProfileSettings(model="lenet5", workers=2),
        "machine": {"processor": "some"},
        "step": spread(step_s),
        "recorded_step": spread(1.01 * step_s),
        "cost": 0.01,
        "recorded_typical_s": step_s,
        "stages": tuple(StageRow(stage=name, seconds=value) for name, value in parts.items()),
        "forward": spread(parts["forward"]),
        "backward": spread(parts["backward"]),
        "update": spread(parts["update"]),
        "layers": tuple(
            LayerRow(
                name=name,
                forward=spread(part * parts["forward"]),
                backward=spread(part * parts["backward"]),
                num_parameters=1234,
                kept_nbytes=4096,
            )
            for name, part in (("first", 0.75), ("last", 0.25))
        ),
        "resources": (ResourceRow(resource="cpu0/compute", busy_s=0.9 * step_s, idle_s=0.0),),
        "overheads": (OverheadRow(what="waiting", seconds=1e-3, share=0.1),),
        "operators": (
            OperatorRow(name="aten::mm", calls=4, seconds=2e-3, share=0.6, nbytes=-1024),
        ),
        "agreement": tuple(
            AgreementRow(phase=phase, ours_s=1.02 * s, torch_s=s, in_operators_s=0.95 * s)
            for phase, s in parts.items()
            if phase in ("forward", "backward")
        ),
        "memory": TensorMemory(
            parameters=1000,
            gradients=1000,
            momentum=1000,
            features=6000,
            inputs=10,
            predicted=9500,
            measured=10_000,
        ),
        "workers": (
            WorkerMemoryRow(worker=0, before_nbytes=100, training_nbytes=1100),
            WorkerMemoryRow(worker=1, before_nbytes=100, training_nbytes=900),
        ),
        "largest": None,
        "samples_per_s": 64 / step_s,
        "findings": (),
        "peak_memory_bytes": (1100, 900),
    }
    return ProfileResult(**given | values)


LARGEST = LargestBatch(
    batch_size=96,
    limit_nbytes=2**30,
    predicted=100,
    complete=True,
    attempts=(
        AttemptRow(batch_size=100, fits=False, seconds=2.0, why="out of memory"),
        AttemptRow(batch_size=96, fits=True, seconds=2.0, why="a training step was taken"),
    ),
)


def write_profile(folder: Path, result: ProfileResult) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(result.model_dump_json())
    write_trace(folder / "trace.json", [steps(0.01, "measured")])
    return folder
