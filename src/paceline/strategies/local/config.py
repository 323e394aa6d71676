"""Configuration of strategy local."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.rounds import Rounds


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Local(Rounds):
    """Rounds of inner steps on each worker, with an exchange of all fragments in each round."""

    workers: Annotated[int, Field(ge=1)] = 2
