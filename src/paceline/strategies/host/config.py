"""The configuration of strategy host."""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import check_codec


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HostReduce:
    """Gradients are summed in the memory of the workers' host, `chunk` layers at a time.

    `codec` encodes the sums that travel between hosts.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    chunk: Annotated[int, Field(ge=1)] = 1
    codec: Annotated[str, AfterValidator(check_codec)] | None = None
