"""Codecs that encode values in few bits before they are sent (Dettmers 2016).

The package imports torch only when one of its names is used.
"""

from typing import TYPE_CHECKING

from paceline.core.importing import lazily

if TYPE_CHECKING:
    from paceline.codecs.blockwise import EightBit, FourBit
    from paceline.codecs.codec import Cast, Codec, Payload
    from paceline.codecs.feedback import ErrorFeedback, OneBit, Threshold
    from paceline.codecs.gathering import Sent, all_gather, reduce_scatter
    from paceline.codecs.names import get

# The modules are not imported here, because all of them import torch.
__getattr__ = lazily(
    __name__,
    {
        "blockwise": ("EightBit", "FourBit"),
        "codec": ("Cast", "Codec", "Payload"),
        "feedback": ("ErrorFeedback", "OneBit", "Threshold"),
        "gathering": ("Sent", "all_gather", "reduce_scatter"),
        "names": ("get",),
    },
)
__all__ = [
    "Cast",
    "Codec",
    "EightBit",
    "ErrorFeedback",
    "FourBit",
    "OneBit",
    "Payload",
    "Sent",
    "Threshold",
    "all_gather",
    "get",
    "reduce_scatter",
]
