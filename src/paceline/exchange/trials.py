"""Find the fastest of several gradient exchanges by timing training steps with each of them.

All exchanges compute the same mean gradients, so trials do not change the trained model. Exchanges
are timed in turns of a few steps (`paceline.core.turns`). When steps become slower or faster,
trials start again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from typing import Any

from torch import nn

from paceline.core.durations import duration
from paceline.core.errors import InvalidInput
from paceline.core.turns import Choice
from paceline.exchange.all_reduce import TorchAllReduce
from paceline.exchange.reducer import Reducer
from paceline.exchange.replica import Method
from paceline.exchange.synchronized import Synchronized
from paceline.links.clock import Clock
from paceline.links.group import Group
from paceline.measure.timing import seconds_between


class Trials(Choice):
    """Chooses the fastest of several exchanges by step times, which are measured in training.

    `names`: the exchanges. `slow`: those that are known to be slow, and tried only when the time of
    steps changes. Trials end after at most `last_step` steps. `on_decision(text)` is called after
    each choice. A step's time is the slowest rank's; since all ranks compare the same times, they
    make the same choice. Attribute `num_searched`: number of steps before the last choice.
    """

    def __init__(
        self,
        names: Iterable[str],
        clock: Clock,
        slow: Collection[str] = (),
        last_step: float = inf,
        on_decision: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(tuple(names), slow=slow)
        self._clock, self._last_step, self._on_decision = clock, last_step, on_decision
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
        """Record the current time, at the end of a step's exchange."""
        self._num_exchanged += 1
        if self.num_steps is not None and self._num_exchanged <= self._last_step:
            self._marks.append(self._clock.mark())

    def finish_measurement(self, group: Group, is_searched: bool = False) -> None:
        """Evaluate the steps timed since the last call; collective.

        During trials, ends the current exchange's turn to be timed. After trials, checks whether
        steps have become slower or faster. `is_searched`: whether a search for the number of layers
        per chunk is still running.
        """
        was_settled = self.settled
        if self._num_exchanged >= self._last_step:
            self.stop()
        else:
            own = seconds_between(self._clock, self._marks)
            steps = [max(of_ranks) for of_ranks in zip(*group.gather(own), strict=True)]
            self._marks = self._marks[-1:]
            self.add(steps, is_steady=not is_searched)
        self._report(was_settled)

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


class Trying(Synchronized):
    """Averages gradients by several methods in turns, and then by the fastest.

    `candidates`: the methods by name. `trials`: chooses among these names; without trials, the
    first method is used. Other arguments: see `Synchronized`. All ranks change to another
    method together.
    """

    _trials: Trials | None = None
    _next: tuple[str, Reducer | TorchAllReduce] | None = None

    def __init__(
        self,
        module: nn.Module,
        candidates: Mapping[str, Method],
        trials: Trials | None = None,
        deadline_s: float | None = None,
        **arguments: Any,
    ) -> None:
        self._candidates = candidates
        self._used = next(iter(candidates)) if trials is None else trials.name
        self._tries = len(candidates) > 1
        super().__init__(module, candidates[self._used], deadline_s, **arguments)
        self._trials = trials

    def _exchanged(self) -> None:
        """Choose the exchange method of the next steps; called on all ranks after an exchange."""
        trials = self._trials
        # Within join(), ranks without samples have no forward pass in which to change methods.
        if trials is None or self._next is not None or self._join_config.enable:
            return
        trials.exchanged()
        if not trials.due:
            return
        used = self._gradients
        assert used is not None  # not None, because only a reducer calls this method
        trials.finish_measurement(self._join(), used.is_searched)
        while self._next is None and self._used != trials.name:
            method, prepared = self._candidates[trials.name], None
            try:
                prepared = self._create_reducer(method, *self._build_params_for_reducer())
                prepared.open()
                self._next = trials.name, prepared
            except InvalidInput as error:  # raised on all ranks, so all ranks drop this method
                if prepared is not None:
                    prepared.close()
                trials.fail(error)

    def _before_forward(self) -> None:
        if self._next is not None and self._gradients is not None and not self._gradients.pending:
            (name, prepared), self._next = self._next, None
            trained = all(parameter.requires_grad for parameter in self._trainable)
            thawed = any(parameter.requires_grad for parameter in self._frozen)
            types = [parameter.dtype for parameter in self._trainable]
            if trained and not thawed and types == self._types:
                self._use(name, prepared)
            else:  # the parameters have changed since the reducer was prepared
                prepared.close()
                self._use(name)
        super()._before_forward()

    def _use(self, name: str, prepared: Reducer | TorchAllReduce | None = None) -> None:
        self._used, self._method = name, self._candidates[name]
        self._replace_reducer(prepared)

    def close(self) -> None:
        """Stop averaging gradients, and free memory and threads; the module stays usable."""
        if self._next is not None:
            self._next[1].close()
        super().close()
