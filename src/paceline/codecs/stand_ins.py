"""Synthetic gradients for codecs whose payload size depends on the values."""

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from paceline.core.wire_format import threshold_of

# Large values are this number times the codec's threshold tau. They are divided by the number of
# ranks before they are encoded, and must then still exceed tau.
_LARGE = 1024.0


def stand_ins_for(codec: str | None) -> Callable[[Tensor], Tensor] | None:
    """Return a function that makes a synthetic gradient for a parameter.

    A gradient consists of zeros and large values; the codec sends only the large values. The share
    of large values is declared in the codec's name. In the sequence of all gradients, large values
    are evenly spaced, so that every part of the sequence has this share. Returns None if the
    codec's name declares no share.
    """
    known = None if codec is None else threshold_of(codec)
    if known is None or known.share is None:
        return None
    tau, share, num_made = known.tau, known.share, 0

    def like(parameter: Tensor) -> Tensor:
        nonlocal num_made
        values = torch.zeros(parameter.numel(), device=parameter.device)
        begin, end = num_made, num_made + len(values)
        num_made = end
        # The k-th large value of the sequence is at index (k + 1/2) / share.
        first, last = (ceil(place * share - 0.5) for place in (begin, end))
        places = (torch.arange(first, last, dtype=torch.float64) + 0.5) / share
        values[(places.long() - begin).clamp(0, len(values) - 1)] = _LARGE * tau
        return values.view(parameter.shape)

    return like
