"""Choose the fastest of several alternatives, whose steps are timed in turns.

    A A A A A A | B B B B B B | B B B B B B | A A A A A A | ...

Each round reverses the order of turns, so a machine that becomes slower affects all alternatives
equally. The list of alternatives begins with the simplest. A later alternative is chosen only if
the median step is faster by `WORTH` and a rank-sum test confirms the difference: a tie selects the
simpler alternative. While a later alternative's median is lower, but not significantly, or its
fastest turn is faster, the two have further turns: another program may have slowed some turns.
`Watch` detects when to choose again.
"""

from collections.abc import Collection, Sequence
from math import sqrt
from statistics import median

WORTH = 0.02  # a later alternative is chosen only if it is faster by this fraction
HOPELESS = 1.15  # alternatives slower than the fastest by this factor have no further turns
# Replaces `HOPELESS` after an alternative's first turn, which warm-up and other programs may slow.
# `HOPELESS` applies even then if the alternative is in `unlikely`: predicted to be slow.
_HOPELESS_AT_FIRST = 1.5
_NUM_SETTLING = 3
_DOUBTFUL = 0.05  # an unused alternative that is faster by this fraction needs further turns
_MAX_TURNS = 4  # per alternative
_CHANGE = 0.1  # relative change of step times after which alternatives are timed again
_LARGE_CHANGE = 0.25  # replaces `_CHANGE` for the first steps after the choice
_SIGNIFICANT = 1.645  # limit of the rank-sum test in standard deviations: one-sided 5 %
_CERTAIN = 3.0  # stricter limit for `Watch`, which repeats the test hundreds of times


class Choice:
    """Times alternatives in turns, uses the fastest, and chooses again when step times change.

    `names`: the alternatives, the simplest first. `slow`: alternatives known to be slower than
    another, and timed only when step times change. `unlikely`: alternatives predicted to be slower
    than another by the factor `HOPELESS`, which one slow turn confirms. `name`: the alternative of
    the next steps. Each turn has `num_settling` untimed steps, in which threads and buffers adapt,
    and then `num_timed` timed steps.
    """

    num_timed = 6

    def __init__(
        self, names: Sequence[str], slow: Collection[str] = (), unlikely: Collection[str] = ()
    ) -> None:
        self._names, self._unlikely = list(names), unlikely
        self.name = names[0]
        self._left = list[str]()  # the alternatives of the turns that are left
        self._former: str | None = None  # the alternative chosen before the turns
        self._begin([name for name in names if name not in slow])

    @property
    def settled(self) -> bool:
        """Whether the choice is made."""
        return not self._left

    @property
    def num_settling(self) -> int:
        """Number of untimed steps of this turn; 0 if it has the previous turn's alternative."""
        return 0 if self._last == self.name else _NUM_SETTLING

    @property
    def num_steps(self) -> int | None:
        """Number of steps until the next `add`; None if only one alternative is left."""
        if len(self._names) == 1:
            return None
        return Watch.num_steps if self.settled else self.num_settling + self.num_timed

    @property
    def seconds(self) -> dict[str, float]:
        """Median step time of each alternative timed so far."""
        return {name: median(steps) for name, steps in self._steps.items() if steps}

    def add(self, seconds: Sequence[float], *, is_steady: bool = True) -> None:
        """Add the seconds of the last `num_steps` steps; then begin the next turn, if any.

        `is_steady`: False if a search is changing the settings of these steps, so that their times
        cannot show whether the machine has changed.
        """
        if not self.settled:
            self._end_turn(seconds[-self.num_timed :])
        elif not is_steady:
            self._watch = Watch()
        elif self._watch.has_changed(seconds):
            self._former = self.name
            self._begin(self._names)

    def restart(self) -> None:
        """Discard the steps of the current turns, and begin these turns again."""
        self._begin([*self._steps])

    def drop(self) -> None:
        """Remove the current alternative, because it has turned out to be unusable."""
        self._names.remove(self.name)
        del self._steps[self.name]
        self._left = [name for name in self._left if name != self.name]
        self._find_slow()
        self._choose()

    def stop(self) -> None:
        """End the timing; use the former choice or, if all alternatives are timed, the fastest."""
        self._left.clear()
        self._choose()
        former = self._former
        if former is not None and former in self._steps and not all(self._steps.values()):
            self.name = former

    def _begin(self, names: Sequence[str]) -> None:
        self._steps: dict[str, list[float]] = {name: [] for name in names}
        self._left = [*names, *reversed(names)]
        self._slow = set[str]()  # alternatives without further turns
        self._last = ""
        self._choose()

    def _end_turn(self, seconds: Sequence[float]) -> None:
        self._steps[self.name] += seconds
        self._last = self._left.pop(0)
        self._find_slow()
        self._left = [name for name in self._left if name not in self._slow] or self._doubtful()
        self._choose()

    def _doubtful(self) -> list[str]:
        """Return further turns of two alternatives if it is uncertain which one is faster."""
        best = self._fastest()
        if len(self._steps[best]) >= _MAX_TURNS * self.num_timed:
            return []
        for seconds in (self.seconds, self._fastest_turns):
            lowest = min(self._candidates, key=seconds.__getitem__)
            if seconds[lowest] < (1 - _DOUBTFUL) * seconds[best]:
                return [best, lowest] if self._last == best else [lowest, best]
        return []

    @property
    def _fastest_turns(self) -> dict[str, float]:
        """Median step time in the fastest turn of each alternative timed so far."""
        num, timed = self.num_timed, {name: steps for name, steps in self._steps.items() if steps}
        return {
            name: min(median(steps[i : i + num]) for i in range(0, len(steps), num))
            for name, steps in timed.items()
        }

    def _find_slow(self) -> None:
        seconds = self._fastest_turns
        least_s = min(seconds.values(), default=0.0)
        self._slow = {name for name, one in seconds.items() if one > self._hopeless(name) * least_s}

    def _hopeless(self, name: str) -> float:
        is_first_turn = len(self._steps[name]) <= self.num_timed
        return _HOPELESS_AT_FIRST if is_first_turn and name not in self._unlikely else HOPELESS

    def _choose(self) -> None:
        if len(self._steps.keys() - self._slow) < 2:
            self._left.clear()  # only one alternative is left
        self.name = self._left[0] if self._left else self._fastest()
        self._watch = Watch(self._steps[self.name])

    @property
    def _candidates(self) -> list[str]:
        """The alternatives that may be chosen: timed, and not much slower than another."""
        return [name for name in self.seconds if name not in self._slow]

    def _fastest(self) -> str:
        best, *others = self._candidates or [*self._steps][:1]
        for name in others:
            if is_faster(self._steps[name], self._steps[best]):
                best = name
        return best


class Watch:
    """Detects that steps become slower or faster; the caller checks every `num_steps` steps.

    `before`: seconds of the chosen alternative's steps during the choice.
    """

    num_steps = 50

    def __init__(self, before: Sequence[float] = ()) -> None:
        self._before, self._first = before, list[float]()

    def has_changed(self, seconds: Sequence[float]) -> bool:
        """Whether steps have become faster or slower by more than 10 % since the first call.

        The first call compares with `before` instead, and allows 25 %: during the choice, other
        alternatives used the threads and caches, too.
        """
        if self._first:
            return _differ(seconds, self._first, _CHANGE)
        self._first = list(seconds)
        return bool(self._before) and _differ(seconds, self._before, _LARGE_CHANGE)


def _differ(steps: Sequence[float], others: Sequence[float], change: float) -> bool:
    pairs = (steps, others), (others, steps)
    return any(is_faster(one, other, change, _CERTAIN) for one, other in pairs)


def is_faster(
    steps: Sequence[float],
    others: Sequence[float],
    worth: float = WORTH,
    deviations: float = _SIGNIFICANT,
) -> bool:
    """Whether `steps` are significantly faster than `others`, with a median lower by `worth`.

    Significance is by the rank-sum test of Mann and Whitney (1947) in its normal approximation;
    `deviations` is the limit in standard deviations.
    """
    if median(steps) >= (1 - worth) * median(others):
        return False
    wins = sum((one < other) + (one == other) / 2 for one in steps for other in others)
    num, num_others = len(steps), len(others)
    expected = num * num_others / 2
    deviation = sqrt(num * num_others * (num + num_others + 1) / 12)
    return wins - expected > deviations * deviation
