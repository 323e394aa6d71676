"""Configuration of strategy host."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import check_codec

_Positive = Annotated[int, Field(ge=1)]
_SEARCHES = ("search", "predicted")


def _check_chunk(chunk: object) -> object:
    if chunk in _SEARCHES or (isinstance(chunk, int) and chunk >= 1):
        return chunk
    raise ValueError(f"must be a number of layers, or {' or '.join(_SEARCHES)} (got {chunk!r})")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HostReduce:
    """Sum gradients in host memory, `chunk` layers at a time.

    `chunk` "search" finds the best size during training with Algorithm 1 of Le et al. 2018, whose
    step and range are `search_step` and `search_range`; "predicted" starts at the predicted best
    size. Both try a size for `interval` steps. `codec` encodes the sums sent between hosts.
    """

    workers: _Positive = 2
    chunk: Annotated[int | Literal["search", "predicted"], BeforeValidator(_check_chunk)] = 1
    codec: Annotated[str, AfterValidator(check_codec)] | None = None
    search_step: _Positive = 5
    search_range: _Positive = 5
    interval: _Positive = 10

    @property
    def first_chunk(self) -> int:
        """The chunk of the first step; a search begins with 1."""
        return 1 if isinstance(self.chunk, str) else self.chunk
