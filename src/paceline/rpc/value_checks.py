"""Check that workers' values are finite, and that their norms are similar."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import hypot, isfinite
from statistics import median

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput, NonFinite

LARGEST_LOSS = 1e12  # a larger loss of a sample means divergence
_KEPT = 64  # number of accepted norms that are kept for comparisons
_FEWEST = 4  # fewest norms of other workers that suffice for a comparison
# Limit on a norm, relative to the median of other workers' norms. Norms of healthy gradients differ
# only by a small factor between batches.
_MOST_TIMES = 100.0
# Limit on a norm if few norms of other workers are known, relative to the parameters' norm. Limit
# on the norm of buffers, relative to the earlier buffers' norm.
_MOST_TIMES_PARAMETERS = 1e6


class ValueChecks:
    """Checks received activations and gradients before the model uses them.

    `parameters`: the parameters of the model. `reads_values`: False in a rehearsal, whose values
    are zeros. `compares_norms`: whether to check norms, because remote workers may send wrong
    values. `is_clipped`: whether gradients are clipped, so that their norms need no check.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, reads_values: bool, is_clipped: bool
    ) -> None:
        self._parameters, self._reads_values = parameters, reads_values
        self._is_clipped, self.compares_norms = is_clipped, False
        self._accepted: defaultdict[str, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )

    def finite(self, who: str, what: str, values: Iterable[Tensor]) -> None:
        """Raise NonFinite if one of the values is not finite."""
        if self._reads_values and not all_finite(values):
            problem = f"{who}: the {what} contain NaN or infinity and were not used"
            raise NonFinite(f"{problem}; lower learning_rate")

    def activations(self, who: str, worker: int, values: Tensor) -> None:
        """Raise NonFinite or InvalidInput for activations that would spoil running statistics."""
        if len(values):
            self.finite(who, "activations", [values])
            self._compare(who, "activations", worker, [values], len(values) ** 0.5)

    def gradients(self, who: str, what: str, worker: int, values: Sequence[Tensor]) -> None:
        """Raise NonFinite or InvalidInput for gradients that would spoil the parameters."""
        self.finite(who, what, values)
        if not self._is_clipped:
            self._compare(who, "gradients", worker, values, 1.0)

    def _compare(
        self, who: str, what: str, worker: int, values: Sequence[Tensor], divisor: float
    ) -> None:
        """Raise InvalidInput if a worker's norm is far above those of other workers.

        If fewer than four norms of other workers are known, compare with the parameters' norm.
        """
        if not (self.compares_norms and self._reads_values):
            return
        norm, accepted = norm_of(values) / divisor, self._accepted[what]
        others = [one for number, one in accepted if number != worker and one > 0]
        if len(others) >= _FEWEST:
            usual, most, whose = median(others), _MOST_TIMES, "median norm of other workers"
        else:
            usual, most = 1 + norm_of(self._parameters), _MOST_TIMES_PARAMETERS
            whose = "parameters' norm"
        with naming(who):
            _check_norm(what, norm, most, usual, whose)
        accepted.append((worker, norm))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if no value is NaN or infinite."""
    # A finite sum implies finite values. Another sum may be an overflow, so check each value.
    return all(bool(one.sum().isfinite()) or bool(one.isfinite().all()) for one in tensors)


@contextmanager
def naming(who: str) -> Iterator[None]:
    """Put `who` before the text of an InvalidInput that the `with` block raises."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(who, str(error)) from None


def check_buffers(found: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Raise NonFinite or InvalidInput for buffers, such as means, that would spoil the model."""
    norm = norm_of(one for one in found if one.is_floating_point())
    if not isfinite(norm):
        raise NonFinite("buffers are NaN or infinite; lower learning_rate")
    usual = 1 + norm_of(one for one in known if one.is_floating_point())
    _check_norm("buffers", norm, _MOST_TIMES_PARAMETERS, usual, "norm of the earlier buffers")


def _check_norm(what: str, norm: float, most: float, usual: float, whose: str) -> None:
    if norm > most * usual:
        problem = f"must have a norm of at most {most:g} times {usual:.3g}, the {whose}"
        raise InvalidInput(what, problem, got=float(f"{norm:.3g}"))


def norm_of(vectors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all values together; not finite if a value is not finite."""
    return hypot(*map(_norm, vectors))


def _norm(vector: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(vector))
    if isfinite(norm):
        return norm
    # In the vector's dtype, the sum of squares may have overflowed.
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
