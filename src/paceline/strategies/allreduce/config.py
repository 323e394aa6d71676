"""The configuration of strategy allreduce."""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import check_codec


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AllReduce:
    """The settings of torch's DistributedDataParallel that decide its speed.

    `bucket_mb` is the bucket size in MiB; None is torch's default, a first bucket of 1 MiB and
    then 25 MiB. `gradient_as_bucket_view` saves a copy of all gradients.
    `codec` encodes what travels.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    bucket_mb: Annotated[int, Field(ge=1)] | None = None
    gradient_as_bucket_view: bool = True
    codec: Annotated[str, AfterValidator(check_codec)] | None = None
