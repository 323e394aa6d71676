"""The result of a scaling study, as result.json holds it, and its cells, as its journal does."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from paceline.core.insight import Insight
from paceline.core.timeline import Origin
from paceline.result_file import read_kind
from paceline.scale_settings import Point, ScaleSettings, Scaling


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cell(_Record):
    """A method on so many workers: what an epoch takes, and where it goes.

    `batch` is that of all workers with strong scaling, and that of each one with weak scaling. All
    seconds are of an epoch: its steps times the median of the repetitions, whose quartiles are the
    `spread`. The parts but `hidden_s` add up to `epoch_s`, with what loading takes. `memory_bytes`
    are those of the fullest worker, of `capacity_bytes` that it may have. With an `error` there is
    nothing else.
    """

    method: str
    workers: int
    batch: int
    scaling: Scaling
    kind: Origin
    epoch_s: float | None = None
    spread: tuple[float, float] | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    exposed_s: float | None = None
    update_s: float | None = None
    idle_s: float | None = None
    hidden_s: float | None = None
    memory_bytes: int | None = None
    capacity_bytes: float | None = None
    error: str | None = None

    @property
    def point(self) -> Point:
        """What the cell is about."""
        return Point(self.method, self.workers, self.batch, self.scaling)


class ScaleResult(_Record):
    """A finished study. `settings` are those asked for, `insights` what the cells say."""

    kind: Literal["scale"] = "scale"
    id: str
    paceline: str
    settings: ScaleSettings
    machine: dict[str, Any]
    cells: tuple[Cell, ...]
    insights: tuple[Insight, ...]


def read_scale(folder: Path) -> ScaleResult | None:
    """Return the result in a study's folder, or None if it is of another kind.

    InvalidInput names the file and what is wrong.
    """
    return read_kind(folder, "scale", ScaleResult)
