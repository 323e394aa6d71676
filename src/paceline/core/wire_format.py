"""How many bytes values take on a wire: what a plan has to know of a codec."""

import math
from dataclasses import dataclass

from paceline.core.errors import InvalidInput

_BLOCK = 1024
_THRESHOLD = "threshold:"


@dataclass(frozen=True)
class WireFormat:
    """Values of `value_bits` each, and so many bytes more for each block of them.

    `kernel` is what encodes and decodes: codecs of one kernel are equally fast.
    """

    name: str
    kernel: str
    value_bits: int
    block_nbytes: int = 0

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return math.ceil(count * self.value_bits / 8) + self.block_nbytes * -(-count // _BLOCK)


_EIGHT_BIT = ("dynamic8", "static8", "mantissa8", "linear8")
WIRE_FORMATS = {
    one.name: one
    for one in (
        *(WireFormat(name, "eightbit", 8, 4) for name in _EIGHT_BIT),
        WireFormat("half", "cast", 16),
        WireFormat("bfloat16", "cast", 16),
        WireFormat("onebit", "onebit", 1, 8),
    )
}


def check_codec(name: str) -> str:
    """Return the name; InvalidInput lists the known ones if it is none of them."""
    if name in WIRE_FORMATS or name == "auto":
        return name
    if name.startswith(_THRESHOLD):
        threshold_of(name)
        return name
    known = ", ".join([*WIRE_FORMATS, f"{_THRESHOLD}TAU", "auto"])
    raise InvalidInput(f"codec: {name!r} is not known; choose one of {known}")


def threshold_of(name: str) -> float | None:
    """Return TAU of "threshold:TAU", or None for another name. InvalidInput if it is no number."""
    if not name.startswith(_THRESHOLD):
        return None
    text = name.removeprefix(_THRESHOLD)
    try:
        tau = float(text)
    except ValueError:
        tau = math.nan
    if not 0 < tau < math.inf:
        raise InvalidInput(f"codec: {name!r}: TAU must be a positive number")
    return tau


def wire_format(name: str) -> WireFormat:
    """Return the format of a codec; InvalidInput if its bytes depend on the values."""
    check_codec(name)
    if name not in WIRE_FORMATS:
        raise InvalidInput(
            f"codec: nobody knows beforehand how many bytes {name!r} takes; "
            f"a plan needs one of {', '.join(WIRE_FORMATS)}"
        )
    return WIRE_FORMATS[name]
