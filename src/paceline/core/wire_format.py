"""Wire formats of codecs: sizes of encoded values, and purposes of messages."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

from paceline.core.errors import InvalidInput
from paceline.core.names import not_known

# Values per piece; one piece is decoded while the next is on the wire.
PIECE = 1 << 22

AUTO = "auto"
_AUTO_FORMAT = "dynamic8"  # the codec that "auto" uses if encoding makes steps faster
_BLOCK = 1024
_THRESHOLD = "threshold:"
FEEDBACK = "+feedback"  # suffix that adds error feedback to a codec

Kernel = Literal["eightbit", "fourbit", "cast", "onebit", "threshold"]


class Purpose(StrEnum):
    """The purpose of communicated values (Du et al. 2017, figure 2, has these seven).

    If a model is split into a first part (body) and a last part (head), `PARAMETERS` and
    `GRADIENTS` are those of the body.
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
    """The size of encoded values: bits per value, and bytes per block.

    `kernel`: the code that encodes and decodes; codecs with the same kernel are equally fast.
    `block_nbytes`: bytes of a block's scales. `encodes_sums`: whether an all-reduce encodes sums,
    too; if not, every rank receives the encoded values of all other ranks. `remembers`: whether a
    tensor's encoding error is added to its values of the next step (error feedback). `share`: share
    of the values that is sent; None: all values. `header_nbytes`: bytes before the values.
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
        """Return the size of `count` values in bytes."""
        sent = count if self.share is None else round(count * self.share)
        blocks_nbytes = self.block_nbytes * -(-count // _BLOCK)
        return self.header_nbytes + math.ceil(sent * self.value_bits / 8) + blocks_nbytes

    def sent_share(self, count: int, nbytes: int, times: int = 1) -> float | None:
        """Return the share of values that was sent in `times` messages of `count` values each.

        `nbytes`: bytes of all messages. Returns None if `count` or `times` is 0, or if the format
        always sends all values.
        """
        if self.share is None or not count * times:
            return None
        return 8 * (nbytes - times * self.header_nbytes) / self.value_bits / (count * times)

    def sharded_nbytes(self, count: int, num_shards: int) -> int:
        """Return the bytes of `count` values in `num_shards` shards, each encoded separately."""
        return num_shards * self.nbytes(-(-count // num_shards))

    @property
    def nbytes_per_value(self) -> float:
        """The mean bytes per value; the bytes of a block are divided among its values."""
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
    """The numbers in a codec's name, "threshold:TAU" or "threshold:TAU@SHARE".

    `tau`: values above it in magnitude are sent. `share`: the share of values that the user expects
    to be sent, above 0 and up to 1; None if the name has no share.
    """

    tau: float
    share: float | None


def check_codec(name: str) -> str:
    """Return `name` if it is the name of a codec; otherwise raise InvalidInput."""
    if name in WIRE_FORMATS or name == AUTO or threshold_of(name) is not None:
        return name
    raise not_known("codec", name, [*WIRE_FORMATS, f"{_THRESHOLD}TAU@SHARE", AUTO])


def _check_field(name: str) -> str:
    """Return a codec's name, or raise ValueError, so that pydantic adds the name of the field."""
    try:
        return check_codec(name)
    except InvalidInput as error:
        raise ValueError(error.message_for("")) from None


CodecName = Annotated[str, AfterValidator(_check_field)]


def threshold_of(name: str) -> Threshold | None:
    """Parse the name of a threshold codec; None for other names, InvalidInput for bad numbers."""
    if not name.startswith(_THRESHOLD):
        return None
    text, at, declared = name.removeprefix(_THRESHOLD).partition("@")
    tau, share = _number(text), _number(declared)
    if not 0 < tau < math.inf:
        raise InvalidInput("codec", "must have a positive TAU in threshold:TAU", got=name)
    if at and not 0 < share <= 1:
        problem = "must have a share above 0 and up to 1 after @"
        raise InvalidInput("codec", problem, got=name)
    return Threshold(tau, share if at else None)


def _number(text: str) -> float:
    """Parse a number, or return NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def remembers(name: str) -> bool:
    """Return whether a codec has error feedback."""
    return threshold_of(name) is not None or (name in WIRE_FORMATS and WIRE_FORMATS[name].remembers)


def wire_format(name: str) -> WireFormat:
    """Return the format of a codec; for "auto", the format of the codec that "auto" may choose.

    Raises InvalidInput for a threshold codec without a declared share.
    """
    threshold = threshold_of(check_codec(name))
    if threshold is None:
        return WIRE_FORMATS[_AUTO_FORMAT if name == AUTO else name]
    if threshold.share is None:
        problem = "must declare the share of values that it sends, because plans depend on it"
        raise InvalidInput("codec", problem, got=name, hint=f"write for example {name}@0.01")
    # Each sent value has 32 bits: an index and a sign. The header is tau.
    share = threshold.share
    return WireFormat(name, "threshold", 32, remembers=True, share=share, header_nbytes=4)


def pieces(count: int) -> list[int]:
    """Return the sizes of the pieces in which `count` values are encoded and exchanged."""
    return [min(PIECE, count - begin) for begin in range(0, count, PIECE)]
