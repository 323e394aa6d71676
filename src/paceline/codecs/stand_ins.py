"""Values that stand in for gradients, where what a codec sends depends on them."""

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from paceline.core.wire_format import threshold_of

# In units of tau: so large that its part in a mean over many ranks is above tau, too, and is sent.
_LARGE = 1024.0


class StandInGradients:
    """Makes gradients of which a threshold `tau` lets through a `share` of the values.

    Large values are spread evenly over all gradients that are made, one after another: each part of
    them has its share, to a value.
    """

    def __init__(self, tau: float, share: float) -> None:
        self._tau, self._share = tau, share
        self._num_made = 0  # values

    def like(self, parameter: Tensor) -> Tensor:
        """Return the gradient of a parameter, float32."""
        values = torch.zeros(parameter.numel(), device=parameter.device)
        begin, end = self._num_made, self._num_made + len(values)
        self._num_made = end
        # The large value of number k stands at (k + 1/2) / share: of n values n x share, rounded.
        first, last = (ceil(place * self._share - 0.5) for place in (begin, end))
        places = (torch.arange(first, last, dtype=torch.float64) + 0.5) / self._share
        values[(places.long() - begin).clamp(0, len(values) - 1)] = _LARGE * self._tau
        return values.view(parameter.shape)


def stand_ins_for(codec: str | None) -> Callable[[Tensor], Tensor] | None:
    """Return what makes gradients of which a codec sends the share that its name declares.

    None if it declares none: then any values do.
    """
    known = None if codec is None else threshold_of(codec)
    if known is None or known.share is None:
        return None
    return StandInGradients(known.tau, known.share).like
