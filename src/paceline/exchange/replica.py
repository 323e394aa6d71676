"""What a strategy makes of a module on one rank: a replica that trains together with the others."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from paceline.record.recorder import Recorder


@dataclass(frozen=True)
class Statistics:
    """What exchanging gradients has taken so far on this rank.

    `bytes_sent` and `bytes_received` are gradient bytes (parameters too, where a strategy sends
    them) that this rank handed to the others and got from them. `exposed_s` is the time in which
    this rank exchanged instead of computing, `hidden_s` that in which the exchange ran beside the
    backward pass; both are totals over `num_steps`, or None where the exchange cannot be seen from
    outside. `chunk` is the number of layers exchanged together, where there are chunks. With a
    `codec` (its name, and why it is this one) `num_nonfinite` gradient values were NaN or infinite
    so far on any rank (with exchange "host": those that were exchanged together with one), and
    optimizers have skipped `num_skipped` steps because of them. Where batches are balanced,
    `shares` are the samples of each rank in a whole batch, and `samples_per_s` what each computes,
    as far as it is known.
    """

    exchange: str
    num_steps: int
    bytes_sent: int
    bytes_received: int
    exposed_s: float | None
    hidden_s: float | None
    chunk: int | None = None
    codec: str | None = None
    num_nonfinite: int = 0
    num_skipped: int = 0
    shares: tuple[int, ...] | None = None
    samples_per_s: tuple[float | None, ...] | None = None


NONE = Statistics("none", 0, 0, 0, 0.0, 0.0)  # of a rank with nobody to exchange with


class Replica(Protocol):
    """A module that is called as before, and whose gradients are those of all ranks' samples."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it gradients accumulate on this rank alone."""
        ...

    def record(self, recorder: Recorder | None) -> None:
        """Tell the recorder of all exchanges from now on; None ends that."""
        ...

    def statistics(self) -> Statistics:
        """Return what exchanging has taken so far."""
        ...

    def close(self) -> None:
        """Give back what the exchange holds; the module stays, and trains alone."""
        ...


class Alone:
    """The replica of a single rank: nobody to exchange with."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        return self._module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is ever exchanged."""
        yield

    def record(self, recorder: Recorder | None) -> None:
        """There is nothing to record."""

    def statistics(self) -> Statistics:
        """Return zeros."""
        return NONE

    def close(self) -> None:
        """Nothing is held."""
