"""What a hub counts while it serves, and what it is told to do beside that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.strategies.wheel.profile import Profile
from paceline.training.loop import Epoch


class Status(NamedTuple):
    """How far a run is; `nbytes` are those of the purposes that travel, without headers.

    `live` are the workers that train.
    """

    version: int
    epoch: int
    trained_s: float
    num_samples: int
    mean_staleness: float
    nbytes: int
    live: tuple[int, ...]


@dataclass(frozen=True)
class Conduct:
    """What a hub does beside answering.

    `test` is called after each epoch, with its number, its mean training loss and its seconds.
    `begun` is told of the workers' profiles before the first step, `look` of the status a few times
    a second. `gone` returns workers of this machine that have ended since the last call, and why.
    The hub waits for `wait_s` if none, or not all, are there. With `is_local` all workers are of
    this machine: what one finds wrong ends the run. When the service was woken, `renew` is called,
    and returns whether all workers must begin their steps again.
    """

    test: Callable[[int, float, float], Epoch]
    begun: Callable[[dict[int, Profile]], None] = lambda profiles: None
    look: Callable[[Status], None] = lambda status: None
    gone: Callable[[], list[tuple[int, str]]] = list
    say: Callable[[str], None] = lambda text: None
    renew: Callable[[], bool] = lambda: False
    wait_s: float = 600.0
    is_local: bool = False


class Learnt(NamedTuple):
    """What an update was made of: samples, and the sum of their losses."""

    num_samples: int
    loss: float


@dataclass
class Tally:
    """What was done: epochs, samples, and when updates were made, in seconds of training.

    `losses` are, of each epoch that is not over, its samples and the sum of their losses; `lost`
    says of each worker that was lost why.
    """

    epochs: list[Epoch] = field(default_factory=list)
    num_samples: int = 0
    update_ends_s: list[float] = field(default_factory=list)
    losses: dict[int, tuple[int, float]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def learnt(self, epoch: int, learnt: Learnt, at_s: float) -> None:
        """Count an update."""
        self.num_samples += learnt.num_samples
        self.update_ends_s.append(at_s)
        count, total = self.losses.get(epoch, (0, 0.0))
        self.losses[epoch] = count + learnt.num_samples, total + learnt.loss

    def mean_loss(self, epoch: int) -> float:
        """Return the mean training loss of the samples of an epoch that is over."""
        count, total = self.losses.pop(epoch, (0, 0.0))
        return total / max(1, count)
