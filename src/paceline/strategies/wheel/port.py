"""Where a worker's values leave and enter a device: copied, encoded and traced."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from paceline.core.plan import Kind
from paceline.strategies.wheel.coding import Coder, Parts, buffer_of, values_of
from paceline.strategies.wheel.split import Purpose
from paceline.strategies.wheel.trace import Trace


class Port:
    """One worker's end, in its own process or at the hub."""

    def __init__(self, coders: Mapping[Purpose, Coder], trace: Trace, device: torch.device) -> None:
        self._coders, self.trace, self.device = coders, trace, device
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)

    def codec(self, purpose: Purpose) -> str:
        """Return what messages of that purpose call their codec; empty without one."""
        return self._coders[purpose].name

    def leave(self, step: int, purpose: Purpose, values: Tensor) -> Parts:
        """Return the values as they travel."""
        with self._coding(step, Kind.ENCODE, purpose):
            buffers = self._coders[purpose].encode(values.detach())
        if self._stream is not None:
            with self.trace.work(step, Kind.D2H, purpose, "d2h"):
                buffers = tuple(buffer.cpu() for buffer in buffers)
        return tuple(buffer_of(buffer.contiguous()) for buffer in buffers)

    def enter(self, step: int, purpose: Purpose, parts: Parts) -> tuple[Tensor, ...]:
        """Return parts that have come, on the device: beside what it computes."""
        buffers = tuple(values_of(part, torch.uint8, part.nbytes) for part in parts)
        if self._stream is None:
            return buffers
        with (
            torch.cuda.stream(self._stream),
            self.trace.work(step, Kind.H2D, purpose, "h2d"),
        ):
            moved = tuple(buffer.to(self.device) for buffer in buffers)
            self._stream.synchronize()
        for buffer in moved:
            buffer.record_stream(torch.cuda.default_stream(self.device))
        return moved

    def decode(
        self, step: int, purpose: Purpose, codec: str, buffers: tuple[Tensor, ...], count: int
    ) -> Tensor:
        """Return the `count` values of parts that have entered, maybe in their memory.

        InvalidInput if they do not fit.
        """
        with self._coding(step, Kind.DECODE, purpose):
            return self._coders[purpose].decode(codec, buffers, count)

    def _coding(self, step: int, kind: Kind, purpose: Purpose) -> AbstractContextManager[None]:
        if not self._coders[purpose].name:
            return nullcontext()
        return self.trace.work(step, kind, purpose)
