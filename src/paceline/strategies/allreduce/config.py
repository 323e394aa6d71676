"""Configuration of strategy allreduce."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import CodecName


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AllReduce:
    """Settings of torch's DistributedDataParallel.

    `bucket_mb`: bucket size in MiB; by default, the first bucket has 1 MiB and all others 25 MiB.
    `gradient_as_bucket_view`: gradients are views of the buckets, which saves the memory of a copy.
    `codec`: compresses the exchanged gradients.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    bucket_mb: Annotated[int, Field(ge=1)] | None = None
    gradient_as_bucket_view: bool = True
    codec: CodecName | None = None
