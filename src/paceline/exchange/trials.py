"""Find the fastest of several gradient exchanges by timing training steps with each of them.

All exchanges compute the same mean gradients, so trials do not change the trained model. Exchanges
are timed in turns of a few steps (`paceline.core.turns`). When steps become slower or faster,
trials start again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.durations import duration
from paceline.core.errors import InvalidInput
from paceline.core.turns import Choice
from paceline.exchange.replica import ModelReplica, Statistics
from paceline.links.clock import Clock
from paceline.links.group import Group
from paceline.measure.timing import seconds_between
from paceline.record.recorder import Recorder


class Trials(Choice):
    """Chooses the fastest of several exchanges by step times, which are measured in training.

    `slow`: exchanges in `names` that are tried only after steps became slower or faster. A step's
    time is the slowest rank's; since all ranks compare the same times, they make the same choice.
    """

    def __init__(self, names: Iterable[str], clock: Clock, slow: Collection[str] = ()) -> None:
        super().__init__(tuple(names), slow=slow)
        self._clock = clock
        self._failed: dict[str, str] = {}
        self._chunks: dict[str, int] = {}  # each exchange's layers per chunk when last timed
        self._marks: list[Any] = []

    @property
    def due(self) -> bool:
        """Whether enough steps were timed, so that all ranks must call `finish_measurement`."""
        return self.num_steps is not None and len(self._marks) > self.num_steps

    def exchanged(self) -> None:
        """Record the current time, at the end of a step's exchange."""
        if self.num_steps is not None:
            self._marks.append(self._clock.mark())

    def finish_measurement(
        self, group: Group, chunk: int | None = None, is_searched: bool = False
    ) -> None:
        """Use the steps timed since the last call; collective.

        Ends the current exchange's turn to be timed. If the choice is made, checks instead whether
        steps have become slower or faster. `chunk`: current number of layers per chunk.
        `is_searched`: whether the search for this number is still running.
        """
        own = seconds_between(self._clock, self._marks)
        steps = [max(of_ranks) for of_ranks in zip(*group.gather(own), strict=True)]
        self._marks = self._marks[-1:]
        if chunk is not None and not self.settled:
            self._chunks[self.name] = chunk
        self.add(steps, is_steady=not is_searched)

    def fail(self, error: InvalidInput) -> None:
        """Stop trying the current exchange, which has raised `error`."""
        self._failed[self.name] = str(error)
        self.drop()

    def why(self, chunk: int | None = None, is_searched: bool = False) -> str:
        """Return a line of text about the exchange in use, and the measured step times.

        `chunk`, `is_searched`: see `finish_measurement`.
        """
        figures = [
            f"{name} {duration(seconds)}"
            + (f" in chunks of {_layers(self._chunks[name])}" if name in self._chunks else "")
            for name, seconds in self.seconds.items()
        ]
        problems = [f"{name} cannot be used: {why}" for name, why in self._failed.items()]
        told = "; ".join([*sorted(figures), *problems])
        if not self.settled:
            return f"{self.name}: being measured" + (f"; {told}" if told else "")
        reason = f"{self.name}: the fastest, by the step: {told}"
        timed = self._chunks.get(self.name)
        if chunk is None or timed is None or chunk == timed:
            return reason
        now = "now trying" if is_searched else "now"
        return f"{reason}; {now} in chunks of {_layers(chunk)}"


class Factory(Protocol):
    """Creates a replica; with `init_sync`, all ranks get rank 0's parameters and buffers."""

    def __call__(self, *, init_sync: bool) -> ModelReplica:
        """Create the replica; collective."""


class Checked:
    """A replica that tries several ways to average gradients, and then uses the fastest.

    `candidates`: factories of replicas by name, the simplest first. The first replica copies rank
    0's parameters to all ranks. All ranks change to another candidate together. Trials end after at
    most `num_steps` steps. `on_decision(text)` is called after each choice. `slow`: candidates
    that are tried only after steps became slower or faster. `clock`: clock of the device, whose
    work may lag behind the host's. `accumulates`: whether each step begins with micro-batches
    within `no_sync`.
    """

    def __init__(
        self,
        candidates: Mapping[str, Factory],
        group: Group,
        clock: Clock,
        num_steps: int,
        on_decision: Callable[[str], None],
        *,
        slow: Collection[str] = (),
        accumulates: bool = False,
    ) -> None:
        self._candidates, self._trials = candidates, Trials(candidates, clock, slow)
        self._group, self._last_step, self._on_decision = group, num_steps, on_decision
        self._recorder: Recorder | None = None
        self._use(self._trials.name, init_sync=True)
        self._num_steps = self.num_searched = 0
        self._accumulates = accumulates

    @property
    def settled(self) -> bool:
        """Whether the trials have ended, so that the fastest candidate is in use."""
        return self._trials.settled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass; also begin a step, unless `no_sync` has begun one."""
        if torch.is_grad_enabled() and not self._accumulates:
            self._begin_step()
        return self._replica(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Begin a step; return a context in which gradients accumulate without an exchange."""
        self._begin_step()
        return self._replica.no_sync()

    def prepare(self, run: Callable[[], None]) -> None:
        """Call the current candidate's `prepare` (see `ModelReplica`)."""
        self._replica.prepare(run)

    def statistics(self) -> Statistics:
        """Return traffic and time of the current candidate's exchanges."""
        return self._replica.statistics()

    def exchange_state(self) -> dict[str, Tensor]:
        """Return the current candidate's state, such as error feedback."""
        return self._replica.exchange_state()

    def load_exchange_state(self, state: dict[str, Tensor]) -> None:
        """Load a result of `exchange_state` into the current candidate."""
        self._replica.load_exchange_state(state)

    def close(self) -> None:
        """Free the current candidate's resources."""
        self._replica.close()

    def record(self, recorder: Recorder | None) -> None:
        """Record exchanges of the current and all later candidates; None stops recording."""
        self._recorder = recorder
        self._replica.record(recorder)

    def _begin_step(self) -> None:
        trials, before = self._trials, self._trials.settled
        self._num_steps += 1
        if self._num_steps > self._last_step:
            if not before:
                trials.stop()
                self._follow(before)
            return
        trials.exchanged()
        if trials.due:
            trials.finish_measurement(self._group)
            self._follow(before)

    def _follow(self, was_settled: bool) -> None:
        """Use the trials' choice; report if trials have just ended or started again."""
        trials, used = self._trials, self._trials.name
        if was_settled and not trials.settled:
            self._on_decision("auto: the time of steps has changed; trying all exchanges again")
        elif trials.settled and not was_settled:
            self.num_searched = self._num_steps - 1
            took = [f"{name} {duration(took_s)}" for name, took_s in trials.seconds.items()]
            self._on_decision(f"auto: {used} from now on; measured {', '.join(took)}")
        if used != self.name:
            self.close()  # close the old replica first: two replicas would hook every gradient
            self._use(used)

    def _use(self, name: str, *, init_sync: bool = False) -> None:
        self.name, self._replica = name, self._candidates[name](init_sync=init_sync)
        if self._recorder is not None:
            self._replica.record(self._recorder)


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"
