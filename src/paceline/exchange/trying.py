"""DistributedDataParallel that tries several gradient exchanges, and keeps the fastest.

All exchanges compute the same mean gradients, so trials do not change the trained model.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from paceline.core.errors import InvalidInput
from paceline.exchange.all_reduce import TorchAllReduce
from paceline.exchange.reducer import Reducer
from paceline.exchange.replica import Method
from paceline.exchange.synchronized import Synchronized
from paceline.exchange.trials import Trials


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
        trials.finish_measurement(self._join().largest, used.is_searched)
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
