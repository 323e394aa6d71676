"""Tensors as parts of messages, and back: as they are, or by a codec."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.names import find_codec
from paceline.codecs.payload import Payload
from paceline.core.errors import InvalidInput, NonFinite
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import Purpose
from paceline.wire.messages import Message

Parts = tuple[memoryview, ...]
# What onebit and threshold lose is added to the next values of the same meaning: a gradient's.
_REMEMBERING = ("onebit", "threshold:")


def codecs_of(config: Wheel) -> dict[Purpose, str | None]:
    """Return the codec of each purpose that can have one."""
    return {
        Purpose.ACTIVATIONS: config.activations,
        Purpose.RESIDUALS: config.residuals,
        Purpose.BODY_PARAMETERS: config.parameters,
        Purpose.BODY_GRADIENTS: config.gradients,
    }


def check_codecs(config: Wheel, dtype: torch.dtype) -> None:
    """Raise InvalidInput for a codec that cannot carry what it is named for."""
    for purpose, codec in codecs_of(config).items():
        if codec is None:
            continue
        find_codec(codec)
        if dtype != torch.float32:
            raise InvalidInput(f"codec: {purpose}={codec} encodes float32; the model is {dtype}")
        if purpose is not Purpose.BODY_GRADIENTS and codec.startswith(_REMEMBERING):
            raise InvalidInput(
                f"codec: {purpose}={codec}: what it loses is made up for by later gradients; "
                f"only {Purpose.BODY_GRADIENTS} can travel by it"
            )


class Coder:
    """One purpose of one worker: its values as parts of messages, and back.

    One end encodes with it and the other one decodes; a codec may remember what it has lost.
    """

    def __init__(self, purpose: Purpose, codec: str | None, dtype: torch.dtype) -> None:
        self._purpose, self._dtype = purpose, dtype
        self._codec: Codec | None = None if codec is None else find_codec(codec)

    @property
    def name(self) -> str:
        """What messages call the codec; empty without one."""
        return "" if self._codec is None else self._codec.name

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the values, of any shape, as bytes on their device.

        NonFinite if a codec cannot carry one of them.
        """
        if self._codec is None:
            return (values.contiguous().reshape(-1).view(torch.uint8),)
        payload = self._codec.encode(values)
        if payload.num_nonfinite:
            raise NonFinite(
                f"{self._purpose}: {payload.num_nonfinite:,} of {payload.count:,} values are NaN "
                f"or infinite, which codec {self.name} cannot carry; choose a smaller "
                "learning_rate"
            )
        return payload.buffers

    def decode(self, codec: str, buffers: Sequence[Tensor], count: int) -> Tensor:
        """Return the `count` values of these bytes, on their device; they may share its memory.

        InvalidInput if the bytes are fewer or more, or made by another codec.
        """
        if codec != self.name:
            raise InvalidInput(
                f"{self._purpose}: came by codec {codec or 'none'!r}, and not by "
                f"{self.name or 'none'!r}"
            )
        if self._codec is not None:
            return self._codec.decode(Payload(self.name, count, tuple(buffers)))
        found = sum(buffer.numel() for buffer in buffers)
        if len(buffers) != 1 or found != count * self._dtype.itemsize:
            raise InvalidInput(
                f"{self._purpose}: {found:,} bytes in {len(buffers)} parts; {count:,} values of "
                f"{self._dtype} are {count * self._dtype.itemsize:,} in one"
            )
        return buffers[0].view(self._dtype)


def parts_of(message: Message) -> Parts:
    """Return the parts of a message that came."""
    return tuple(memoryview(part) for part in message.parts)


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def values_of(part: memoryview, dtype: torch.dtype, count: int) -> Tensor:
    """Return the values in a part, in its memory; InvalidInput if there are not `count` of them."""
    if part.nbytes != count * dtype.itemsize:
        raise InvalidInput(
            f"{part.nbytes:,} bytes; {count:,} values of {dtype} are {count * dtype.itemsize:,}"
        )
    if not count:
        return torch.empty(0, dtype=dtype)
    whole = bytearray(part) if part.readonly else part  # torch would warn of what it cannot write
    return torch.frombuffer(whole, dtype=dtype)
