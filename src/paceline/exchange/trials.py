"""Find the fastest of several gradient exchanges or codecs by timing training steps with each.

Exchanges are timed in turns of a few steps (`paceline.core.turns`). When steps become slower or
faster, trials start again; so do unfinished trials when the ranks' shares of a batch change.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import Any

from paceline.core.durations import duration
from paceline.core.errors import InvalidInput
from paceline.core.turns import Choice
from paceline.links.clock import Clock
from paceline.measure.timing import seconds_between

_CHANGE = 0.1  # trials begin again if a rank's share changes by this fraction of the batch
_MAX_RESTARTS = 2


class Trials(Choice):
    """Chooses the fastest of several exchanges, or codecs, by step times measured in training.

    `names`, `slow`, `unlikely`: the exchanges, as in `Choice`. Trials end after at most `last_step`
    steps. `on_decision(text)` is called after each choice. `shares`: returns each rank's number of
    samples per step, if batches are balanced; times with very different shares are not comparable.
    A step's time is the slowest rank's; since all ranks compare the same times, they make the same
    choice. Attribute `num_searched`: number of steps before the last choice.
    """

    def __init__(
        self,
        names: Iterable[str],
        clock: Clock,
        slow: Collection[str] = (),
        unlikely: Collection[str] = (),
        last_step: float = inf,
        on_decision: Callable[[str], None] = lambda text: None,
        shares: Callable[[], Sequence[int]] = lambda: (),
    ) -> None:
        super().__init__(tuple(names), slow, unlikely)
        self._clock, self._last_step, self._on_decision = clock, last_step, on_decision
        self._shares, self._shares_before, self._num_restarts = shares, tuple(shares()), 0
        self._num_exchanged = self.num_searched = 0
        self._failed: dict[str, str] = {}
        self._marks: list[Any] = []

    @property
    def due(self) -> bool:
        """Whether enough steps were timed, so that all ranks must call `finish_measurement` now."""
        if self._num_exchanged >= self._last_step:
            return not self.settled
        return self.num_steps is not None and len(self._marks) > self.num_steps

    def exchanged(self) -> None:
        """Record the current time, once per step, always at the same point of the step."""
        self._num_exchanged += 1
        if self.num_steps is not None and self._num_exchanged <= self._last_step:
            self._marks.append(self._clock.mark())

    def finish_measurement(
        self, slowest: Callable[[Sequence[float]], list[float]], is_searched: bool = False
    ) -> None:
        """Evaluate the steps timed since the last call; collective.

        During trials, ends the current exchange's turn to be timed. After trials, checks whether
        steps have become slower or faster. `slowest`: returns each value's maximum over ranks.
        `is_searched`: whether a search for the number of layers per chunk is still running.
        """
        was_settled, have_shares_changed = self.settled, self._have_shares_changed()
        if self._num_exchanged >= self._last_step:
            self.stop()
        elif have_shares_changed and not was_settled and self._num_restarts < _MAX_RESTARTS:
            self._num_restarts += 1
            self.restart()
        else:
            steps = slowest(seconds_between(self._clock, self._marks))
            self.add(steps, is_steady=not is_searched)
        self._marks = self._marks[-1:]
        self._report(was_settled)

    def _have_shares_changed(self) -> bool:
        """Whether a rank's share has changed by more than `_CHANGE` since the last call."""
        before, self._shares_before = self._shares_before, tuple(self._shares())
        # `before` is empty until batches are balanced
        changes = [abs(one - old) for one, old in zip(self._shares_before, before, strict=False)]
        return max(changes, default=0) > _CHANGE * sum(before)

    def _report(self, was_settled: bool) -> None:
        """Call `on_decision` if trials have just ended or started again."""
        if was_settled and not self.settled:
            self._on_decision("auto: the time of steps has changed; trying all exchanges again")
        elif self.settled and not was_settled:
            self.num_searched = self._num_exchanged
            took = [f"{name} {duration(took_s)}" for name, took_s in self.seconds.items()]
            self._on_decision(f"auto: {self.name} from now on; measured {', '.join(took)}")

    def fail(self, error: InvalidInput) -> None:
        """Stop trying the current exchange, which has raised `error`."""
        self._failed[self.name], was_settled = str(error), self.settled
        self._on_decision(f"auto: {self.name} cannot be used: {error}")
        self.drop()
        self._report(was_settled)

    @property
    def why(self) -> str:
        """A line of text: the exchange in use, and the measured step times."""
        figures = [f"{name} {duration(seconds)}" for name, seconds in self.seconds.items()]
        problems = [f"{name} cannot be used: {why}" for name, why in self._failed.items()]
        told = "; ".join([*sorted(figures), *problems])
        if not self.settled:
            return f"{self.name}: being measured" + (f"; {told}" if told else "")
        return f"{self.name}: the fastest, by the step: {told}"
