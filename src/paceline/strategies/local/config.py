"""Configuration of strategy local."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.rounds import Rounds


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Local(Rounds):
    """Train in rounds: a worker takes inner steps, and exchanges each model fragment once."""

    workers: Annotated[int, Field(ge=1)] = 2
