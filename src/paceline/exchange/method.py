"""How gradients become the mean of all ranks: what an exchange does, and which one is used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.exchange.compressed import Compression
from paceline.exchange.layout import Chunk, Layout
from paceline.exchange.replica import Statistics
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.tune.chunk import ChunkTimes, ChunkTuner


class Exchange(Protocol):
    """How gradients become their mean. All ranks call everything but `ready` in the same order.

    One that is `chunked` reads gradients when they are ready, any other when backward is over.

    `touched` says of each parameter whether its gradient has changed on this rank; one that has
    changed on no rank stays as it is on all.
    """

    name: str
    chunked: bool
    recorder: Recorder | None

    def open(self, layout: Layout) -> None:
        """Get what gradients of this layout need, on all ranks together."""
        ...

    def arrange(self, layout: Layout, chunks: Sequence[Chunk]) -> None:
        """Exchange these chunks from the next step on; the layout has the bytes it had before."""
        ...

    def begin(self) -> None:
        """Begin a step."""
        ...

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Begin to exchange the chunk: this rank's part of it is there."""
        ...

    def finish(self, touched: Sequence[bool]) -> Sequence[bool]:
        """Wait until each gradient that changed on any rank is the mean of all; say which have."""
        ...

    def times(self) -> Sequence[ChunkTimes]:
        """Return when each chunk of the last step was ready and exchanged, where that is known."""
        ...

    def discard(self) -> None:
        """Give up the step that has begun: this rank's backward pass has failed."""
        ...

    def statistics(self) -> Statistics:
        """Return what it has taken so far."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


@dataclass(frozen=True)
class Method:
    """How gradients are exchanged: by what `make` returns for a group; None: by torch's reducer.

    `make` is told whether gradients may be views of the exchange's memory. `chunk` is a number of
    layers, or makes a tuner for a model of so many. `compression` is for torch's reducer.
    """

    name: str
    make: Callable[[Group, bool], Exchange] | None = None
    chunk: int | Callable[[int], ChunkTuner] = 1
    compression: Compression | None = None
