"""The configuration of strategy tree."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Tree:
    """Worker 0 is the server; the tree over the others is binary."""

    workers: Annotated[int, Field(ge=1)] = 2
