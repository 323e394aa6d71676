"""A saved plan, as result.json holds it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from paceline.result import RankingRows
from paceline.result_file import read_kind


class PlanResult(BaseModel):
    """What was predicted of a model on a machine: all plans, best first.

    `machine` names a machine file, or is "this machine". `facts` are what else a reader must know
    of how the plan was made: the version, and of this machine what it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["plan"] = "plan"
    id: str
    model: str
    machine: str
    batch_size: int
    input_shape: tuple[int, ...] | None = None
    facts: dict[str, Any]
    ranking: RankingRows


def read_plan(folder: Path) -> PlanResult | None:
    """Return the plan in a folder, or None if its result is of another kind.

    InvalidInput names the file and what is wrong.
    """
    return read_kind(folder, "plan", PlanResult)
