"""Codecs that encode values in few bits before they are sent (Dettmers 2016).

The package imports torch only when one of its names is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.codecs.blockwise import EightBit, FourBit
    from paceline.codecs.codec import Cast, Codec, Payload
    from paceline.codecs.feedback import ErrorFeedback, OneBit, Threshold
    from paceline.codecs.gathering import Sent, all_gather, reduce_scatter
    from paceline.codecs.names import find_codec as get

# The modules are not imported here, because all of them import torch.
_MODULES = {
    "blockwise": ("EightBit", "FourBit"),
    "codec": ("Cast", "Codec", "Payload"),
    "feedback": ("ErrorFeedback", "OneBit", "Threshold"),
    "gathering": ("Sent", "all_gather", "reduce_scatter"),
    "names": ("get",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
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
    if name in _MODULE_OF:
        module = import_module(f"{__name__}.{_MODULE_OF[name]}")
        return getattr(module, "find_codec" if name == "get" else name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
