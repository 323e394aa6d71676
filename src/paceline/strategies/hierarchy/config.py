"""Configuration of strategy hierarchy."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hierarchy:
    """Sum gradients in each host's memory, then among groups of hosts, then groups of groups.

    `chunk`: number of layers exchanged together. `between`: how hosts exchange their sums. With
    "rings" every worker receives all sums and updates its weights. With "servers" each host is the
    parameter server of a share of the parameters. `servers`: use only this number of hosts as
    parameter servers.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    chunk: Annotated[int, Field(ge=1)] = 1
    between: Literal["rings", "servers"] = "rings"
    servers: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _has_servers(self) -> Self:
        if self.servers is not None and self.between != "servers":
            raise ValueError("servers: requires between=servers")
        return self
