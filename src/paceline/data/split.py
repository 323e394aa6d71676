"""The split of a source that comes without a test set."""

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.data.sampler import shuffled

_TEST_SHARE = 5  # one in five


def stratified_split(
    targets: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the train and of the test samples, each in ascending order.

    One fifth of each class (rounded, but at least one of two or more) is for testing; a class of
    one sample stays in training. Raises InvalidInput if nothing would be left for testing.
    """
    order = shuffled(len(targets), seed, epoch=0)
    is_test = np.zeros(len(targets), dtype=bool)
    for label in np.unique(targets):
        members = order[targets[order] == label]
        if len(members) > 1:
            is_test[members[: max(1, round(len(members) / _TEST_SHARE))]] = True
    if not is_test.any():
        raise InvalidInput(
            "no class has two samples, so none can be set aside for testing; "
            "add samples, or supply a test set"
        )
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
