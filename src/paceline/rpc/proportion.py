"""Check values that workers send: finite, and in proportion to those of the others."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import hypot, isfinite
from statistics import median

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput, NonFinite

LARGEST_LOSS = 1e12  # of a sample: a run diverges that has more
_KEPT = 64  # norms of accepted gradients
_FEWEST = 4  # of others, by which one may be judged
# Norms of healthy gradients differ by a few times from one batch to the next.
_MOST_TIMES = 100.0
_MOST_TIMES_PARAMETERS = 1e6  # before others can be compared with


class Proportions:
    """The norms of the `what` that were accepted last, by which others are judged."""

    def __init__(self, what: str = "gradients") -> None:
        self._what = what
        self._accepted: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def check(self, worker: int, norm: float, parameters_norm: Callable[[], float]) -> None:
        """Accept a worker's norm. InvalidInput if those of others, or parameters, are far below."""
        others = [one for who, one in self._accepted if who != worker and one > 0]
        if len(others) >= _FEWEST:
            usual, most, whose = median(others), _MOST_TIMES, f"{self._what} of the others"
        else:
            usual, most, whose = 1 + parameters_norm(), _MOST_TIMES_PARAMETERS, "parameters"
        if norm > most * usual:
            raise InvalidInput(
                self._what,
                f"whose norm is {norm:.3g} are out of all proportion to that of the {whose}, "
                f"{usual:.3g}",
            )
        self._accepted.append((worker, norm))


class ValueChecks:
    """Checks values before a model with these `parameters` takes them.

    In a rehearsal, whose values are all zeros, `reads_values` is False. Norms are compared if
    `compares_norms` is set, as for workers of elsewhere; not those of gradients that are clipped.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, reads_values: bool, is_clipped: bool
    ) -> None:
        self._parameters, self._reads_values = parameters, reads_values
        self._is_clipped, self.compares_norms = is_clipped, False
        self._of_gradients, self._of_activations = Proportions(), Proportions("activations")

    def finite(self, who: str, what: str, values: Iterable[Tensor]) -> None:
        """Raise NonFinite if one of the values is not finite."""
        if self._reads_values and not all_finite(values):
            raise NonFinite(
                f"{who}: the {what} are NaN or infinite, and were not used; choose a smaller "
                "learning_rate"
            )

    def activations(self, who: str, worker: int, values: Tensor) -> None:
        """Raise NonFinite or InvalidInput before a head has taken activations into its buffers."""
        if not len(values):
            return
        self.finite(who, "activations", [values])
        if self.compares_norms and self._reads_values:
            with naming(who):
                norm = norm_of([values]) / len(values) ** 0.5
                self._of_activations.check(worker, norm, lambda: norm_of(self._parameters))

    def gradients(self, who: str, what: str, worker: int, values: Sequence[Tensor]) -> None:
        """Raise NonFinite or InvalidInput for gradients that would spoil the parameters."""
        self.finite(who, what, values)
        if self.compares_norms and self._reads_values and not self._is_clipped:
            with naming(who):
                norm = norm_of(values)
                self._of_gradients.check(worker, norm, lambda: norm_of(self._parameters))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if no value is NaN or infinite; then each was read only once."""
    # A sum with NaN or infinity in it is never finite; a sum of finite values may overflow.
    return all(bool(one.sum().isfinite()) or bool(one.isfinite().all()) for one in tensors)


@contextmanager
def naming(who: str) -> Iterator[None]:
    """Name the worker in an InvalidInput that its values cause."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(who, str(error)) from None


def check_buffers(found: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Raise NonFinite or InvalidInput for buffers, such as running means, that spoil a model."""
    norm = norm_of(one for one in found if one.is_floating_point())
    if not isfinite(norm):
        raise NonFinite("buffers: values that are NaN or infinite; choose a smaller learning_rate")
    usual = 1 + norm_of(one for one in known if one.is_floating_point())
    if norm > _MOST_TIMES_PARAMETERS * usual:
        raise InvalidInput(
            "buffers",
            f"buffers whose norm is {norm:.3g} are out of all proportion to those before, "
            f"{usual:.3g}",
        )


def norm_of(vectors: Iterable[Tensor]) -> float:
    """Return the norm of all values, which is not finite if one of them is not."""
    return hypot(*map(_norm, vectors))


def _norm(vector: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(vector))
    if isfinite(norm):
        return norm
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))  # squares had overflown
