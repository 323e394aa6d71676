"""A replica that was predicted to be the fastest, checked against what its steps take.

steps   0 .. 2    3 .. 14           15 .. 17   18 .. 29
settle    are measured      settle     are measured
first candidate             the next one, if the first was much slower than predicted
and that one was predicted to be faster than it turned out
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, NamedTuple

import torch

from paceline.exchange.replica import Replica, Statistics
from paceline.links.group import Group
from paceline.record.recorder import Recorder

_NUM_SETTLING = 2  # in which torch makes its buckets, and caches fill
_NUM_MEASURED = 8


class Candidate(NamedTuple):
    """A way of exchanging: its name, the predicted seconds of a step, and what makes a replica."""

    name: str
    predicted_s: float
    make: Callable[[], Replica]


class Checked:
    """Uses the first candidate, and goes on to the next where steps take longer than predicted.

    That is by more than the share `tolerance`, and only for a candidate that was predicted to be
    faster than that. In the end it uses the one whose steps were the shortest. `say` is told of
    every change of mind; all ranks change theirs together, on what the slowest of them measured,
    and not after `num_steps`.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        group: Group,
        tolerance: float,
        num_steps: int,
        say: Callable[[str], None],
    ) -> None:
        self._candidates, self._group, self._tolerance = candidates, group, tolerance
        self._last_step, self._say = num_steps, say
        self._recorder: Recorder | None = None
        self._measured: dict[int, float] = {}
        self._number = 0
        self._replica = candidates[0].make()
        self._starts: list[float] = []
        self._num_steps = 0
        self._settled = len(candidates) == 1
        self.num_searched = 0

    @property
    def name(self) -> str:
        """The candidate in use."""
        return self._candidates[self._number].name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass; a step begins with it."""
        if not self._settled and torch.is_grad_enabled():
            self._begin_step()
        return self._replica(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it gradients accumulate on this rank alone."""
        return self._replica.no_sync()

    def record(self, recorder: Recorder | None) -> None:
        """Tell the recorder of all exchanges from now on, whichever candidate makes them."""
        self._recorder = recorder
        self._replica.record(recorder)

    def statistics(self) -> Statistics:
        """Return what exchanging has taken with the candidate in use."""
        return self._replica.statistics()

    def close(self) -> None:
        """Give back what the exchange holds."""
        self._replica.close()

    def _begin_step(self) -> None:
        self._starts.append(time.monotonic())
        self._num_steps += 1
        if len(self._starts) > _NUM_SETTLING + _NUM_MEASURED:
            self._judge()
        elif self._num_steps > self._last_step:
            self._settle()

    def _judge(self) -> None:
        """Compare what the candidate took with what was predicted, and go on from there."""
        steps = zip(self._starts[_NUM_SETTLING:], self._starts[_NUM_SETTLING + 1 :], strict=False)
        own = median(end - start for start, end in steps)
        self._measured[self._number] = max(self._group.gather(own))
        fastest_s = min(self._measured.values())
        is_first = len(self._measured) == 1
        was_right = fastest_s <= (1 + self._tolerance) * self._candidates[0].predicted_s
        left = [
            number
            for number, candidate in enumerate(self._candidates)
            if number not in self._measured and candidate.predicted_s < fastest_s
        ]
        room = self._last_step - self._num_steps > _NUM_SETTLING + _NUM_MEASURED
        if (is_first and was_right) or not left or not room:
            self._settle()
        else:
            self._try(left[0])

    def _try(self, number: int) -> None:
        now, other = self._candidates[self._number], self._candidates[number]
        self._say(
            f"auto: {now.name} takes {_ms(self._measured[self._number])} a step, and not "
            f"{_ms(now.predicted_s)} as predicted; trying {other.name}, predicted to take "
            f"{_ms(other.predicted_s)}"
        )
        self._use(number)

    def _settle(self) -> None:
        self._settled = True
        self.num_searched = self._num_steps - 1 if len(self._measured) > 1 else 0
        best = min(self._measured, key=self._measured.__getitem__, default=self._number)
        if len(self._measured) > 1:
            names = [
                f"{self._candidates[number].name} {_ms(seconds)}"
                for number, seconds in self._measured.items()
            ]
            self._say(
                f"auto: {self._candidates[best].name} from now on; measured {', '.join(names)}"
            )
        if best != self._number:
            self._use(best)

    def _use(self, number: int) -> None:
        self._replica.close()
        self._number, self._starts = number, []
        self._replica = self._candidates[number].make()
        if self._recorder is not None:
            self._replica.record(self._recorder)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
