"""Configuration of strategy local."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.rounds import Rounds


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Local(Rounds):
    """Options of strategy local, as in DiLoCo (arXiv 2311.08105).

    In a round, a worker takes `sync_every` inner steps, which are ordinary steps on its own
    replica, and exchanges each fragment of the model once. For the options see `Rounds`.
    """

    workers: Annotated[int, Field(ge=1)] = 2
