"""The result of a run on uneven workers, as result.json holds it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from paceline.result import EpochRow
from paceline.result_file import read_kind
from paceline.settings import UnevenSettings

_Points = tuple[tuple[float, int], ...]  # seconds of training, and a number


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerRow(_Record):
    """A worker: as it was asked for, and what it reached alone on the batch size, in samples/s.

    `updates_share` is its part of all updates, `predicted_share` that of the plan, if there is one.
    """

    name: str
    spec: str
    tried_samples_per_s: float | None
    samples: int
    updates_share: float
    predicted_share: float | None


class UnevenResult(_Record):
    """What a run on uneven workers did.

    `score` is what `accuracy` is called: "precision@1" where a sample may have several labels.
    `updates`, `utilisation` and what follows are by worker; `staleness` counts batches by how many
    updates of others they missed. `batch_sizes` are points where a size changed, `update_gaps` by
    how many updates the first worker was ahead of the last. Seconds are those of training, without
    the tests between epochs. `lost` are workers that ended before the run, `faults` where traced
    batches depart from the plan.
    """

    kind: Literal["uneven"] = "uneven"
    id: str
    settings: UnevenSettings
    strategy: str = "hogbatch"
    machine: dict[str, Any]
    workers: tuple[WorkerRow, ...]
    updates: dict[str, int]
    utilisation: dict[str, float]
    epochs: tuple[EpochRow, ...]
    accuracy: float
    score: str = "accuracy"
    loss: float
    trained_s: float
    samples_per_s: float
    predicted_samples_per_s: float | None
    staleness: dict[str, dict[int, int]]
    batch_sizes: dict[str, _Points]
    update_gaps: _Points
    lost: tuple[str, ...]
    faults: tuple[str, ...]
    peak_memory_bytes: tuple[int, ...]


def read_uneven(folder: Path) -> UnevenResult | None:
    """Return the result in a run's folder, or None if it is of another kind.

    InvalidInput names the file and what is wrong.
    """
    return read_kind(folder, "uneven", UnevenResult)
