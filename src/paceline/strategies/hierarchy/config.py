"""The configuration of strategy hierarchy."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hierarchy:
    """Gradients are summed in the memory of the workers' hosts, then group by group of hosts.

    `chunk` layers go together. With "rings" every worker gets all sums and updates its weights;
    with "servers" each host is the parameter server of a share of them, or only the first
    `servers` hosts are.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    chunk: Annotated[int, Field(ge=1)] = 1
    between: Literal["rings", "servers"] = "rings"
    servers: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _has_servers(self) -> Self:
        if self.servers is not None and self.between != "servers":
            raise ValueError('servers: a number of them needs between "servers"')
        return self
