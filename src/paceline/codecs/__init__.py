"""Codecs that encode values in few bits before they are sent (Dettmers 2016)."""

from paceline.codecs.blockwise import EightBit, FourBit
from paceline.codecs.codec import Cast, Codec, Payload
from paceline.codecs.feedback import ErrorFeedback, OneBit, Threshold
from paceline.codecs.gathering import Sent, all_gather, reduce_scatter
from paceline.codecs.names import get

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
