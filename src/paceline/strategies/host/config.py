"""Configuration of strategy host."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import CodecName

_Positive = Annotated[int, Field(ge=1)]
_SEARCHES = ("search", "predicted")


def _check_chunk(chunk: object) -> object:
    if chunk in _SEARCHES or (isinstance(chunk, int) and chunk >= 1):
        return chunk
    raise ValueError(f"must be a number of layers, or {' or '.join(_SEARCHES)} (got {chunk!r})")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HostReduce:
    """Sum gradients in host memory, `chunk` layers at a time.

    `chunk`: number of layers, or the name of a search, which finds the fastest number during
    training. "search": Algorithm 1 of Le et al. 2018, with increment `search_step` and range
    `search_range`, both in layers. "predicted": a search that starts at the predicted best number.
    `interval`: training steps for each number that a search tries. `codec`: compresses the sums
    that hosts exchange.
    """

    workers: _Positive = 2
    chunk: Annotated[int | Literal["search", "predicted"], BeforeValidator(_check_chunk)] = 1
    codec: CodecName | None = None
    search_step: _Positive = 5
    search_range: _Positive = 5
    interval: _Positive = 10

    @property
    def first_chunk(self) -> int:
        """Layers per chunk in the first step; 1 if `chunk` is a search."""
        return 1 if isinstance(self.chunk, str) else self.chunk
