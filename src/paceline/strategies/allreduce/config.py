"""The configuration of strategy allreduce."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AllReduce:
    """The settings of torch's DistributedDataParallel that decide its speed.

    `bucket_mb` is the bucket size in MiB; None is torch's default, a first bucket of 1 MiB and
    then 25 MiB. `gradient_as_bucket_view` saves a copy of all gradients.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    bucket_mb: Annotated[int, Field(ge=1)] | None = None
    gradient_as_bucket_view: bool = True
