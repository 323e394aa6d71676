"""Wire formats of codecs: the bytes that encoded values take, and what travels."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from paceline.core.errors import InvalidInput
from paceline.core.names import not_known

# Values of a piece: pieces are pipelined, so that one is decoded while the next is on the wire.
PIECE = 1 << 22

AUTO = "auto"
_AUTO_FORMAT = "dynamic8"  # what "auto" encodes with, where it does
_BLOCK = 1024
_THRESHOLD = "threshold:"
FEEDBACK = "+feedback"  # after the name of a codec that has error feedback only where asked for

Kernel = Literal["eightbit", "fourbit", "cast", "onebit", "threshold"]


class Purpose(StrEnum):
    """The purpose of values that are communicated: the seven of Du et al. 2017, figure 2.

    `PARAMETERS` and `GRADIENTS` are those of the body where a model is cut into body and head.
    """

    LABELS = "labels"
    ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation_gradients"
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    HEAD_PARAMETERS = "head_parameters"
    HEAD_GRADIENTS = "head_gradients"


@dataclass(frozen=True)
class WireFormat:
    """Values of `value_bits` each, and so many bytes more for each block of them.

    `kernel` is what encodes and decodes: codecs of one kernel are equally fast. `encodes_sums`: if
    an all-reduce encodes sums, too; otherwise every rank gets what all others have encoded.
    `remembers`: if what a codec loses is added to the next values of the same tensor.
    Where only some values are sent, `share` of them take these bits, after `header_nbytes`.
    """

    name: str
    kernel: Kernel
    value_bits: int
    block_nbytes: int = 0
    encodes_sums: bool = True
    remembers: bool = False
    share: float | None = None
    header_nbytes: int = 0

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        sent = count if self.share is None else round(count * self.share)
        blocks_nbytes = self.block_nbytes * -(-count // _BLOCK)
        return self.header_nbytes + math.ceil(sent * self.value_bits / 8) + blocks_nbytes

    def sent_share(self, count: int, nbytes: int, times: int = 1) -> float | None:
        """Return the share of `times` x `count` values that so many bytes in all have sent.

        None for a format that sends all values, or if there were none.
        """
        if self.share is None or not count * times:
            return None
        return 8 * (nbytes - times * self.header_nbytes) / self.value_bits / (count * times)

    def sharded_nbytes(self, count: int, num_shards: int) -> int:
        """Return the bytes of `count` values of which each shard is encoded on its own."""
        return num_shards * self.nbytes(-(-count // num_shards))

    @property
    def nbytes_per_value(self) -> float:
        """Bytes of a value, and its part of what is sent for its block."""
        share = 1.0 if self.share is None else self.share
        return share * self.value_bits / 8 + self.block_nbytes / _BLOCK


_EIGHT_BIT = ("dynamic8", "static8", "mantissa8", "linear8")
_FOUR_BIT = ("e3m0", "dynamic4")
WIRE_FORMATS = {
    one.name: one
    for one in (
        *(WireFormat(name, "eightbit", 8, 4) for name in _EIGHT_BIT),
        *(WireFormat(name, "fourbit", 4, 4, encodes_sums=False) for name in _FOUR_BIT),
        *(WireFormat(f"{name}{FEEDBACK}", "fourbit", 4, 4, False, True) for name in _FOUR_BIT),
        WireFormat("half", "cast", 16),
        WireFormat("bfloat16", "cast", 16),
        WireFormat("onebit", "onebit", 1, 8, remembers=True),
    )
}


class Threshold(NamedTuple):
    """What "threshold:TAU" or "threshold:TAU@SHARE" says.

    Values above `tau` in magnitude are sent. `share` is the part of all values that they are
    declared to be, over 0 and up to 1; None if nobody says.
    """

    tau: float
    share: float | None


def check_codec(name: str) -> str:
    """Return the name; InvalidInput lists the known ones if it is none of them."""
    if name in WIRE_FORMATS or name == AUTO or threshold_of(name) is not None:
        return name
    raise not_known("codec", name, [*WIRE_FORMATS, f"{_THRESHOLD}TAU@SHARE", AUTO])


def threshold_of(name: str) -> Threshold | None:
    """Return what the name of a threshold says, None for another; InvalidInput if not numbers."""
    if not name.startswith(_THRESHOLD):
        return None
    text, at, declared = name.removeprefix(_THRESHOLD).partition("@")
    tau, share = _number(text), _number(declared)
    if not 0 < tau < math.inf:
        raise InvalidInput("codec", f"{name!r}: TAU must be a positive number")
    if at and not 0 < share <= 1:
        raise InvalidInput(
            "codec",
            f"{name!r}: after @ stands the share of the values that is sent, over 0 and up to 1",
        )
    return Threshold(tau, share if at else None)


def _number(text: str) -> float:
    """Return the number in a text, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def remembers(name: str) -> bool:
    """Return True if a codec adds what it loses to the next values of the same tensor."""
    return threshold_of(name) is not None or (name in WIRE_FORMATS and WIRE_FORMATS[name].remembers)


def wire_format(name: str) -> WireFormat:
    """Return the format of a codec, and of "auto" that of what it encodes, where it does.

    InvalidInput if the bytes depend on the values, and nobody has declared how many are sent.
    """
    known = _AUTO_FORMAT if check_codec(name) == AUTO else name
    threshold = threshold_of(known)
    if threshold is None:
        return WIRE_FORMATS[known]
    if threshold.share is None:
        raise InvalidInput(
            "codec",
            f"nobody knows beforehand how many bytes {name!r} takes: declare the share of the "
            f"values that it sends, such as {name}@0.01",
        )
    word_nbytes = 4  # the place of a value and its sign; and, once, tau
    return WireFormat(
        *(name, "threshold", 8 * word_nbytes),
        remembers=True,
        share=threshold.share,
        header_nbytes=word_nbytes,
    )


def pieces(count: int) -> list[int]:
    """Return the number of values in each piece of an encoded exchange."""
    return [min(PIECE, count - begin) for begin in range(0, count, PIECE)]
