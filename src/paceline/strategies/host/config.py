"""The configuration of strategy host."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Host:
    """Gradients are summed in the memory of the workers' host, `chunk` layers at a time."""

    workers: Annotated[int, Field(ge=1)] = 2
    chunk: Annotated[int, Field(ge=1)] = 1
