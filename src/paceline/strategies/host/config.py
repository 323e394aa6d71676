"""The configuration of strategy host."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import check_codec

_Positive = Annotated[int, Field(ge=1)]
_SEARCHES = ("search", "predicted")


def _check_chunk(chunk: object) -> object:
    if chunk in _SEARCHES or (isinstance(chunk, int) and chunk >= 1):
        return chunk
    raise ValueError(f"must be a number of layers, or {' or '.join(_SEARCHES)}, not {chunk!r}")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HostReduce:
    """Gradients are summed in the memory of the workers' host, `chunk` layers at a time.

    `chunk` may be searched while steps are taken: by "search" with Algorithm 1 of Le et al. 2018,
    whose step and range are `search_step` and `search_range`, or from the "predicted" best one.
    Either tries a size for `interval` steps. `codec` encodes the sums that travel between hosts.
    """

    workers: _Positive = 2
    chunk: Annotated[int | Literal["search", "predicted"], BeforeValidator(_check_chunk)] = 1
    codec: Annotated[str, AfterValidator(check_codec)] | None = None
    search_step: _Positive = 5
    search_range: _Positive = 5
    interval: _Positive = 10

    @property
    def first_chunk(self) -> int:
        """The layers that are exchanged together at first: a search begins with single ones."""
        return 1 if isinstance(self.chunk, str) else self.chunk
