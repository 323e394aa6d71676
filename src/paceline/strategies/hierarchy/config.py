"""The configuration of strategy hierarchy."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hierarchy:
    """Gradients are summed in the memory of the workers' hosts, then group by group of hosts.

    `chunk` layers go together. With "rings" every worker gets all sums and updates its weights;
    with "servers" each host is the parameter server of a share of them.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    chunk: Annotated[int, Field(ge=1)] = 1
    between: Literal["rings", "servers"] = "rings"
