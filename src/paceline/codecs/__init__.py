"""8-bit and other small types for what travels between workers (Dettmers 2016).

Importing it does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.codecs.blockwise import EightBit
    from paceline.codecs.codec import Cast, Codec, Payload
    from paceline.codecs.feedback import ErrorFeedback, OneBit, Threshold
    from paceline.codecs.four_bit import FourBit
    from paceline.codecs.gathering import Sent, all_gather, reduce_scatter
    from paceline.codecs.names import find_codec as get

# Modules that are imported when a name of theirs is asked for, since they import torch. `get` is
# `find_codec`, whose own name says more where no module stands before it.
_MODULES = {
    "blockwise": ("EightBit",),
    "codec": ("Cast", "Codec", "Payload"),
    "feedback": ("ErrorFeedback", "OneBit", "Threshold"),
    "four_bit": ("FourBit",),
    "gathering": ("Sent", "all_gather", "reduce_scatter"),
    "names": ("find_codec",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_NAMES = {"get": "find_codec"}
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


def __getattr__(name: str) -> Any:
    if name in __all__:
        own = _NAMES.get(name, name)
        return getattr(import_module(f"{__name__}.{_MODULE_OF[own]}"), own)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
