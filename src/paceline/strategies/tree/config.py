"""Configuration of strategy tree."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Tree:
    """Sum gradients in a binary tree with worker 0 at its root."""

    workers: Annotated[int, Field(ge=1)] = 2
