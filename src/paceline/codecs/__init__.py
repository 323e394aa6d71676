"""8-bit and other small types for what travels between workers (Dettmers 2016).

Importing it does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.codecs.gathering import Sent, all_gather, reduce_scatter

__all__ = ["Sent", "all_gather", "reduce_scatter"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from paceline.codecs import gathering

        return getattr(gathering, name)
    raise AttributeError(f"module 'paceline.codecs' has no attribute {name!r}")
